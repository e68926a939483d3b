// tuning.js - the page of chunkflow tune: every ChunkSize with every K, and the best of them, with a report of the best
// below.

const MOST_CELLS = 4096;         // more than this nobody looks at one by one
const MOST_TIMES_THE_BEST = 4;   // slower cells are as pale as this
const LEAST_COLOUR = 12;         // in per cent: so that a slow cell is not mistaken for an empty one

const milliseconds = x => x < 1 ? estimate(1e3 * x) + " ms" : estimate(x) + " s";

function startTuning(tuning) {
  byId("tuning-page").hidden = false;
  document.title = "chunkflow tune";
  byId("brand").textContent = "the best, in the batch that is nearest to the mean";
  byId("to-report").hidden = tuning.winner < 0;
  byId("to-report").addEventListener("click", openReport);
  byId("report-page").classList.add("below");
  const page = makeTuningPage(tuning);
  page.fillHeader();
  page.fillMap();
  page.fillRanking();
  page.fillFrontier();
  page.fillSplits();
}

// Opens the report, which is folded away on a narrow page.
function openReport() {
  byId("report-page").hidden = false;
  request("gantt", "memory", "chunks");
  byId("report-page").scrollIntoView();
  byId("sentence").tabIndex = -1;
  byId("sentence").focus({preventScroll: true});
}

function makeTuningPage(tuning) {
  const byNumber = new Map(tuning.candidates.map(c => [c.id, c]));
  const winner = byNumber.get(tuning.winner), manySplits = tuning.splits.length > 1;
  const columns = tuning.chunk_sizes.length, rows = tuning.ks.length;
  const numbersOf = cell => byNumber.get(cell.numbers);
  const cellAt = (x, y) => tuning.cells[x * rows + y]; // x: ChunkSize, y: K
  const isWinner = cell => winner !== undefined && cell.chunk_size === winner.chunk_size && cell.k === winner.k;

  // ---- words ----

  // Fills in the answer in one line.
  function fillGain() {
    const base = tuning.baseline, gain = byId("tuning-gain");
    if (!winner) return;
    const [number, words] = base.fits ? pace(base.seconds, winner.seconds, [base.bytes, winner.bytes])
      : [milliseconds(winner.seconds), " an iteration"];
    gain.append(element("strong", {}, number), words + ", estimated");
  }

  function fillHeader() {
    const words = [tuning.source, `${tuning.model} on ${tuning.gpu}`, count(tuning.sequences) + " sequences"];
    if (tuning.left_out) words.push(`${count(tuning.left_out)} longer ones left out`);
    words.push(`${count(tuning.batch_tokens.length)} batches of ${count(tuning.batch)}, seed ${count(tuning.seed)}`,
      `${count(tuning.n_candidates)} candidates, ${count(tuning.simulated)} schedules simulated`,
      "limit " + gib(tuning.limit_bytes));
    fillGain();
    byId("tuning-sentence").textContent = tuning.sentence;
    byId("tuning-setting").textContent = words.join(" \u00b7 ");
  }

  function splitWords(index) {
    const of = tuning.splits[index];
    let text = `tensor ${of.tensor_parallel}, pipeline ${of.pipeline_parallel}, data ${of.data_parallel}`;
    if (of.data_parallel > 1) text += ` (ZeRO ${of.zero})`;
    if (of.max_cp) text += `, sequences over up to ${of.max_cp} ranks`;
    if (of.virtual_stages > 1) text += `, ${of.virtual_stages} virtual stages in a ${of.placement}`;
    return text;
  }

  const recomputeWord = c => (c.recompute_layers ? `${c.recompute} in ${c.recompute_layers}` : c.recompute)
    + offloadWords(c.offload);
  const shortSplit = of => `${of.tensor_parallel} \u00d7 ${of.pipeline_parallel} \u00d7 ${of.data_parallel}`
    + (of.zero > 1 ? ` Z${of.zero}` : "") + (of.max_cp ? ` /${of.max_cp}` : "");

  function waysOf(c) {
    const state = c.state_window ? ", state streamed" : "";
    const outputs = c.outputs ? ` with attention's outputs${c.outputs > 1 ? " in host memory" : ""}` : "";
    return `${c.schedule}, ${c.replay} replay${outputs}${state}; ${splitWords(c.split)}; recompute ${recomputeWord(c)}`;
  }

  // Returns the terms of a memory report above 0, the largest first.
  function termWords(memory) {
    return Object.entries(memory).filter(([key, bytes]) => bytes > 0 && key in tuning.terms)
      .sort((a, b) => b[1] - a[1]).map(([key, bytes]) => `${tuning.terms[key]} ${gib(bytes)}`).join(", ");
  }

  function exactWords(c) {
    const few = tuning.batch_tokens.length < 2; // one batch gives no estimate of the error
    const behind = c.id === tuning.winner ? "the best" : `${percent(c.behind / winner.seconds)} behind the fastest`
      + (few ? "" : `, \u00b1 ${percent(c.behind_confidence / winner.seconds)}`);
    const range = few ? "" : `, \u00b1 ${milliseconds(c.confidence)} (95 %)`;
    return `${milliseconds(c.seconds)} an iteration${range}: ${behind}\n`
      + `${waysOf(c)}\n`
      + `${gib(c.bytes)} at most, on stage ${c.stage}${c.limited ? " (schedules were held down to fit)" : ""}: `
      + `${termWords(c.memory)}\n`
      + (c.host_bytes ? `${gib(c.host_bytes)} in host memory` : "")
      + (c.state_window ? `, for which passes wait ${percent(c.stream_waiting)} of the time` : "")
      + (c.host_bytes ? "\n" : "")
      + `bubbles and replays ${percent(c.bubble_useful)}; ${c.chunks.toFixed(1)} chunks a rank`;
  }

  function nearestWords(cell) {
    if (cell.nearest === undefined) return "\nnothing that was timed fits";
    const near = tuning.cells[cell.nearest], c = numbersOf(near);
    return `\nthe nearest that is known to fit: ChunkSize ${count(near.chunk_size)}, K ${count(near.k)}, `
      + `${gib(c.bytes)}, ${milliseconds(c.seconds)}`;
  }

  function infeasibleWords(cell, c) {
    return `does not fit: needs ${gib(c.bytes)} on stage ${c.stage}, ${gib(c.bytes - tuning.limit_bytes)} more than `
      + `the limit of ${gib(tuning.limit_bytes)}: ${c.why}\n`
      + `what breaks it: ${tuning.terms[c.breaks]}, ${gib(c.memory[c.breaks])} (${termWords(c.memory)})\n`
      + `the thriftiest: ${waysOf(c)}` + nearestWords(cell);
  }

  function dominatedWords(c) {
    const seen = c.estimate ? `about ${milliseconds(c.estimate)} by first batches`
      : isBounded(c) ? `at least ${milliseconds(c.bound)}` : "slower, as others like it are";
    return `${seen}, so it was not timed to the end: ${c.why}\n`
      + `the most promising: ${waysOf(c)}\nwhether it fits is not known; --show N times more of them`;
  }

  function cellWords(cell) {
    const c = numbersOf(cell), own = byNumber.get(cell.candidate);
    let text = `ChunkSize ${count(cell.chunk_size)}, K ${count(cell.k)}: `;
    if (c.status === "ok") text += exactWords(c);
    else if (c.status === "infeasible") text += infeasibleWords(cell, c);
    else text += c.status === "dominated" ? dominatedWords(c) : "not reached before the search was interrupted";
    if (c.chunk_size !== cell.chunk_size || c.k !== cell.k)
      text += `\nits schedules are those of K ${count(c.k)}: ${own.why}`;
    return text;
  }

  // ---- the map ----

  // True if a bound alone was enough to give a candidate up. Others are slower because similar ones are.
  const fastest = byNumber.get(tuning.ranking[0]);
  const isBounded = c => !fastest || c.bound > fastest.seconds;

  function secondsOf(c) {
    if (c.status === "ok") return c.seconds;
    return c.status !== "dominated" ? 0 : c.estimate || (isBounded(c) ? c.bound : 0);
  }

  // The seconds of the slowest cell, in multiples of the best's, within reason.
  function spread() {
    const slowest = Math.max(...tuning.cells.map(cell => secondsOf(numbersOf(cell))));
    return Math.max(1.1, Math.min(MOST_TIMES_THE_BEST, slowest / winner.seconds));
  }

  // The strength of a cell's colour in per cent: 100 for the best, 0 for the slowest.
  function strength(seconds) {
    if (!winner || !(seconds > 0)) return 0;
    return Math.max(LEAST_COLOUR, Math.min(100, 100 * (1 - Math.log(seconds / winner.seconds) / Math.log(most))));
  }

  function cellText(c) {
    if (c.status === "ok") return exact(c.seconds, milliseconds(c.seconds));
    if (c.status === "infeasible") return exact(c.bytes, gib(c.bytes));
    if (c.status !== "dominated") return "?";
    if (c.estimate) return exact(c.estimate, "~ " + milliseconds(c.estimate));
    return isBounded(c) ? exact(c.bound, "\u2265 " + milliseconds(c.bound)) : "slower";
  }

  function makeCell(cell, index) {
    const c = numbersOf(cell);
    const classes = ["cell", c.status, ...(isWinner(cell) ? ["winner"] : [])];
    const button = element("button", {type: "button", class: classes.join(" "), tabindex: "-1", "data-cell": index,
      "aria-describedby": "map-details", style: {"--strength": strength(secondsOf(c)).toFixed(1) + "%"}}, cellText(c));
    return element("td", {role: "gridcell"}, button);
  }

  function fillMap() {
    const table = byId("map");
    if (tuning.cells.length > MOST_CELLS) {
      byId("map-details").textContent = count(tuning.cells.length) + " cells are too many to be drawn; --json has all.";
      return;
    }
    const names = tuning.chunk_sizes.map(size => element("th", {scope: "col", title: count(size)}, shortCount(size)));
    table.append(element("tr", {}, element("th", {}, "K \\ ChunkSize"), ...names));
    for (let y = 0; y < rows; y++) {
      const made = element("tr", {}, element("th", {scope: "row"}, count(tuning.ks[y])));
      for (let x = 0; x < columns; x++) made.append(makeCell(cellAt(x, y), x * rows + y));
      table.append(made);
    }
    fillMapLegend();
    listenToMap(table);
    const box = table.parentElement, cell = table.querySelector(".winner");
    const sayWide = () => byId("map-sideways").hidden = box.scrollWidth <= box.clientWidth;
    sayWide();
    addEventListener("resize", sayWide);
    const seat = cell && cell.parentElement; // if it is in sight, the first column stays whole
    if (seat && seat.offsetLeft + seat.offsetWidth > box.clientWidth) box.scrollLeft = seat.offsetLeft - box.clientWidth / 2;
  }

  function fillMapLegend() {
    const legend = byId("map-legend"), has = status => tuning.cells.some(cell => numbersOf(cell).status === status);
    const add = (kind, text) => legend.append(element("span", {}, element("i", {class: "swatch cell " + kind,
      style: {"--strength": "60%"}}), text));
    if (winner) add("ok winner", "the best");
    if (has("ok")) add("ok", "timed on all batches; the stronger the colour, the faster");
    if (has("dominated")) add("dominated", "given up: ~ as first batches say, \u2265 a lower bound");
    if (has("infeasible")) add("infeasible", "does not fit; what it would need");
    if (has("untried")) add("untried", "not reached");
  }

  // ---- going about in it ----

  function listenToMap(table) {
    const buttons = [...table.querySelectorAll("button")], order = new Map();
    for (const button of buttons) order.set(Number(button.dataset.cell), button);
    const cellOf = event => {
      const button = event.target.closest("button[data-cell]");
      return button ? Number(button.dataset.cell) : -1;
    };
    let at = winner ? tuning.cells.findIndex(isWinner) : 0;
    const choose = index => {
      order.get(at).tabIndex = -1;
      order.get(at = index).tabIndex = 0;
      byId("map-details").textContent = cellWords(tuning.cells[index]);
    };
    const open = index => {
      if (isWinner(tuning.cells[index])) openReport();
    };
    choose(at);
    table.addEventListener("pointermove", event => {
      const index = cellOf(event);
      showTip(index >= 0 ? cellWords(tuning.cells[index]) : "", event);
    });
    table.addEventListener("pointerleave", event => showTip("", event));
    table.addEventListener("focusin", event => choose(cellOf(event)));
    table.addEventListener("click", event => {
      const index = cellOf(event);
      if (index < 0) return;
      choose(index);
      if (event.detail === 0) open(index); // Enter or the space bar
    });
    table.addEventListener("dblclick", event => cellOf(event) >= 0 && open(cellOf(event)));
    table.addEventListener("keydown", event => {
      const to = neighbourOf(at, event.key);
      if (to < 0) return;
      order.get(to).focus();
      event.preventDefault();
    });
  }

  // Returns the cell to which a key leads; -1 for other keys.
  function neighbourOf(index, key) {
    let x = Math.floor(index / rows), y = index % rows;
    if (key === "ArrowLeft") x--;
    else if (key === "ArrowRight") x++;
    else if (key === "ArrowUp") y--;
    else if (key === "ArrowDown") y++;
    else if (key === "Home") x = 0;
    else if (key === "End") x = columns - 1;
    else return -1;
    return Math.max(0, Math.min(columns - 1, x)) * rows + Math.max(0, Math.min(rows - 1, y));
  }

  // ---- the best of them ----

  const stateWord = c => c.state_window ? "streams" : "stays";

  // True if an earlier candidate has the same time, ChunkSize and split: one of them is enough.
  function repeatsEarlier(c, before) {
    return before.some(b => b.split === c.split && b.chunk_size === c.chunk_size
      && c.seconds <= b.seconds * (1 + 1e-9));
  }

  // Returns a candidate's cells. The first is its place by time, which may not be 1 for the chosen one, if an equally
  // fast candidate needs more memory or is less simple.
  function rankingCells(c) {
    return [exact(c.id, String(tuning.ranking.indexOf(c.id) + 1)),
      ...(manySplits ? [shortSplit(tuning.splits[c.split])] : []), exact(c.chunk_size, count(c.chunk_size)),
      exact(c.k, count(c.k)), c.schedule, c.replay, recomputeWord(c), stateWord(c),
      exact(c.seconds, milliseconds(c.seconds)), exact(c.behind / winner.seconds, percent(c.behind / winner.seconds)),
      exact(c.bubble_useful, percent(c.bubble_useful)), exact(c.bytes, gib(c.bytes))];
  }

  function baselineCells(b) {
    const behind = b.seconds / winner.seconds - 1;
    return ["today", ...(manySplits ? [shortSplit(b)] : []), b.packed ? "packed" : "unsplit", "-", "1f1b", "-",
      b.recompute + offloadWords(b.offload), "stays", exact(b.seconds, milliseconds(b.seconds)),
      exact(behind, percent(behind)),
      exact(b.bubble_useful, percent(b.bubble_useful)), exact(b.bytes, gib(b.bytes))];
  }

  function baselineNote(b) {
    const shared = b.context_parallel > 1
      ? `${b.context_parallel} GPUs share each sequence (context parallelism, ${b.exchange}), ` : "";
    if (b.fits)
      return `today: 1F1B that splits no sequence, ${b.packed ? "packed to the longest" : "a micro-batch a sequence"}, `
        + `${shared}recompute ${b.recompute}${offloadWords(b.offload)}.`;
    const today = "What one has today, 1F1B that splits no sequence, ";
    if (b.bytes) return `${today}does not fit: it needs ${gib(b.bytes)} at least.`;
    return `${today}cannot be timed${b.why ? ": " + b.why : ""}.`;
  }

  function fillRanking() {
    const shown = [], table = byId("ranking");
    byId("ranking-note").textContent = baselineNote(tuning.baseline)
      + " The first row is the chosen one; the others are in order of time, numbered by their place in it. waste:"
      + " bubbles and replays. Times are estimates from the GPU's numbers: measure one, then trust the differences.";
    if (!winner) return;
    for (const c of tuning.ranking.slice(0, tuning.show).map(id => byNumber.get(id)))
      if (c === winner || !repeatsEarlier(c, shown)) shown.push(c);
    const byTime = shown.filter(c => c !== winner);
    table.append(head(["place", ...(manySplits ? ["tensor, pipeline, data"] : []), "ChunkSize", "K", "schedule",
      "replay", "recompute", "state", "iteration", "behind", "waste", "fullest GPU"]));
    table.append(row(rankingCells(winner), {class: "chosen"}));
    for (const c of byTime) table.append(row(rankingCells(c)));
    if (tuning.baseline.fits) table.append(row(baselineCells(tuning.baseline)));
    keepOnNarrow(table, ["place", "ChunkSize", "K", "iteration", "fullest GPU"]);
  }

  // ---- time against memory, and the splits ----

  function fillFrontier() {
    const table = byId("frontier");
    byId("frontier-part").hidden = tuning.frontier.length < 2;
    table.append(head(["fullest GPU", "iteration", ...(manySplits ? ["tensor, pipeline, data"] : []), "ChunkSize", "K",
      "schedule", "replay", "recompute", "state"]));
    for (const c of tuning.frontier)
      table.append(row([exact(c.bytes, gib(c.bytes)), exact(c.seconds, (c.about ? "~ " : "") + milliseconds(c.seconds)),
        ...(manySplits ? [shortSplit(c.split)] : []), exact(c.chunk_size, count(c.chunk_size)),
        exact(c.k, count(c.k)), c.schedule, c.replay, recomputeWord(c), stateWord(c)],
      c.id === tuning.winner ? {class: "chosen"} : {}));
    keepOnNarrow(table, ["fullest GPU", "iteration", "ChunkSize", "K", "schedule"]);
  }

  function splitOutcome(c) {
    if (!c) return ["not reached", ""];
    if (c.status === "ok") return [exact(c.seconds, milliseconds(c.seconds)), exact(c.bytes, gib(c.bytes))];
    if (c.status === "infeasible") return ["does not fit", exact(c.bytes, `${gib(c.bytes)} needed`)];
    if (c.estimate) return [exact(c.estimate, `about ${milliseconds(c.estimate)}`), ""];
    return [isBounded(c) ? exact(c.bound, `at least ${milliseconds(c.bound)}`) : "slower", ""];
  }

  function fillSplits() {
    const table = byId("splits");
    byId("splits-part").hidden = !manySplits;
    table.append(head(["tensor, pipeline, data", "ChunkSize", "K", "iteration", "fullest GPU"]));
    tuning.splits.forEach((of, index) => {
      const c = byNumber.get(tuning.best_of_splits[index]);
      table.append(row([shortSplit(of), c ? exact(c.chunk_size, count(c.chunk_size)) : "",
        c ? exact(c.k, count(c.k)) : "", ...splitOutcome(c)], c === winner && c ? {class: "chosen"} : {}));
    });
    keepOnNarrow(table, ["tensor, pipeline, data", "ChunkSize", "K", "iteration"]);
  }

  const most = winner ? spread() : 1;
  return {fillHeader, fillMap, fillRanking, fillFrontier, fillSplits};
}
