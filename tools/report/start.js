// start.js - shows the parts of the page that have data.

takeData(readData("data"));
const tuning = readData("tuning"), reproduction = readData("reproduction");

// Draws all parts before printing, and restores the page afterwards.
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  for (const part of document.querySelectorAll("details.more")) part.open = true;
  byId("report-page").hidden = data.sentence === undefined;
});
addEventListener("afterprint", () => document.documentElement.classList.remove("paper"));

// Folds away the less important parts on a narrow page.
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

// For tests and the console.
window.chunkflow = {data, tuning, reproduction, state, scheduleAt, findPass, waitedFor, transferOf, chart, at, show,
  pan, choose, mark, focusOn, chartAsSvg};
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("chunkflow-drawn")));
