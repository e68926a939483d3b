// start.js - shows the parts of the page that there are data for.

takeData(readData("data"));
const tuning = readData("tuning"), reproduction = readData("reproduction");

// Before the parts draw for paper, which has all of them, and after.
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  for (const part of document.querySelectorAll("details.more")) part.open = true;
  byId("report-page").hidden = data.sentence === undefined;
});
addEventListener("afterprint", () => document.documentElement.classList.remove("paper"));

// A narrow page shows what one asks first; the rest opens at a touch.
function foldPage() {
  for (const part of document.querySelectorAll("details.more")) part.open = !narrow.matches;
  byId("report-page").hidden = data.sentence === undefined || (tuning !== null && narrow.matches);
  if (data.sentence !== undefined) request("gantt", "memory", "chunks");
}

if (tuning) startTuning(tuning);
if (reproduction) startReproduction(reproduction);
if (data.sentence !== undefined) startReport();
foldPage();
narrow.addEventListener("change", foldPage);

// Tests and the console look in here.
window.chunkflow = {data, tuning, reproduction, state, scheduleAt, findPass, waitedFor, transferOf, chart, at, show,
  pan, choose, mark, focusOn, chartAsSvg};
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("chunkflow-drawn")));
