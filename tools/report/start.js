// start.js - shows the parts of the page that there are data for.

const tuning = readData("tuning"), reproduction = readData("reproduction");

// Before the parts draw for paper, and after.
addEventListener("beforeprint", () => document.documentElement.classList.add("paper"));
addEventListener("afterprint", () => document.documentElement.classList.remove("paper"));

if (tuning) startTuning(tuning);
if (reproduction) startReproduction(reproduction);
if (data.sentence !== undefined) startReport();

// Tests and the console look in here.
window.chunkflow = {data, tuning, reproduction, state, scheduleAt, findPass, waitedFor, transferOf, chart, at, show,
  pan, choose, mark, focusOn, chartAsSvg};
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("chunkflow-drawn")));
