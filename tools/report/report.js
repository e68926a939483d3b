// report.js - a report's words, tables and controls.

// ---- the head ----

function settingWords() {
  const words = [data.source];
  if (data.part) words.push(data.part);
  if (data.model)
    words.push(data.model + (data.gpu ? " on " + data.gpu : "") + ", tensor parallel " + data.tensor_parallel);
  words.push(count(data.n_sequences) + " sequences", count(data.n_tokens) + " tokens",
    "the longest " + count(data.longest_sequence), "ChunkSize " + count(data.chunk_size), 
    "K " + count(data.k) + (data.k_default ? ` (${data.k_default})` : ""),
    count(data.n_stages) + (data.n_stages === 1 ? " stage" : " stages"));
  if (data.launch_seconds >= 0)
    words.push(`${number(1e6 * data.launch_seconds)} \u00b5s lost around each kernel${data.launch_hint}`);
  if (data.rank_words) words.push(data.rank_words.slice(2));
  return words;
}

// Keeps an option and its numbers on one line.
function optionsIn(text) {
  const parts = text.split(/(--[a-z][a-z-]*(?: (?:none|\d+(?:[.,]\d+)*K?)\b)?)/);
  return parts.map((part, i) => i % 2 ? element("code", {}, part) : part);
}

const adviceLine = text => element("li", {}, ...optionsIn(text));

// Returns the baseline, with context parallelism if that is faster. It is then not drawn, because its stages differ.
function baselineOf() {
  const shared = data.context_baseline;
  if (!shared) return data.schedules[data.baseline];
  return {name: data.context_words, makespan: shared.seconds, total: shared.bytes};
}

// Returns the bytes of the fullest GPU; 0 without a model.
function bytesOf(s) {
  return s.total || (s.memory ? s.memory[s.fullest].total : 0);
}

// ---- the first screen: an answer in one line, one bar, one thing to do ----

function fillGain() {
  const best = data.schedules[data.best], base = baselineOf(), run = data.schedules[data.measured];
  const gain = byId("gain"), big = (text, rest) => gain.append(element("strong", {}, text), rest);
  const estimated = (unit === "s" ? ", estimated" : "") + data.rank_words;
  if (run)
    big(time(run.makespan), ` measured, where ${shownTime(data.schedules[data.predicted].makespan)} were estimated`);
  else if (best && base && !tuning) {
    const [number, words] = pace(base.makespan, best.makespan, [bytesOf(base), bytesOf(best)]);
    big(number, words + estimated);
  }
  else if (best)
    big(shownTime(best.makespan), estimated + (base ? "" : ", where whole sequences cannot be run"));
}

// Fills in the bar of all stage time: work, replays, idle.
function fillWhole() {
  const s = data.schedules[data.measured] || data.schedules[data.best], bar = byId("whole");
  if (!s || !(s.makespan > 0)) return;
  const idle = Math.max(0, s.bubble_busy), replays = replayShare(s), names = ["work", "replays", "idle"];
  const parts = [Math.max(0, 1 - idle - replays), replays, idle], fills = ["var(--F)", "var(--R)", "var(--alone)"];
  parts.forEach((part, i) => {
    if (part > 0) bar.append(element("i", {style: {width: 100 * part + "%", background: fills[i]}}));
    byId("whole-legend").append(element("span", {}, swatch(fills[i]), `${names[i]} ${(100 * part).toFixed(1)} %`));
  });
  bar.setAttribute("aria-label", names.map((name, i) => `${name} ${(100 * parts[i]).toFixed(1)} %`).join(", "));
  byId("whole-legend").append(element("span", {}, `of all stage time in ${s.name}`));
}

function fillDo() {
  if (!data.do) return;
  byId("do").hidden = false;
  byId("do").append(...optionsIn(data.do));
}

function fillHeader() {
  fillGain();
  fillWhole();
  fillDo();
  byId("sentence").textContent = data.sentence;
  byId("setting").append(...optionsIn(settingWords().join(" \u00b7 ")));
  byId("advice").append(...data.advice.filter(text => text !== data.do).map(adviceLine));
}

// ---- the numbers that matter ----

// A share of all stage time, like the idle share, so that the two add up.
const replayShare = s => s.makespan > 0 ? s.replayed / (s.makespan * s.idle.length) : 0;

// Returns the share in which passes wait for state that is streamed from host memory.
const streamShare = s => s.makespan > 0 ? s.stream_seconds / (s.makespan * s.idle.length) : 0;

function numberCells(s, base, memory, streams, speed) {
  const ratio = base > 0 && s.makespan > 0 ? base / s.makespan : NaN;
  const replays = replayShare(s), kept = Math.max(0, ...s.peak_live) / s.virtual_stages;
  const state = Math.max(0, ...s.peak_state_tokens) / s.virtual_stages;
  const cells = [s.name, exact(s.makespan, s.measured ? count(s.makespan) : shown(s.makespan)),
    Number.isFinite(ratio) ? exact(ratio, unit === "s" ? estimate(ratio) : ratio.toFixed(3)) : "-",
    exact(s.bubble_busy, percent(s.bubble_busy)), exact(replays, percent(replays))];
  if (!memory) cells.push(exact(kept, count(kept)), exact(state, count(state)));
  const rate = s.tokens_per_second_a_gpu, used = s.model_flops_utilisation;
  if (speed) cells.push(rate ? exact(rate, estimate(rate)) : "-", used ? exact(used, percent(used)) : "-");
  if (streams) cells.push(exact(streamShare(s), `${percent(streamShare(s))}, ${count(s.stream_waits)} passes`));
  if (!memory) return cells;
  if (!s.memory) return [...cells, "-", "-"];
  const total = s.memory[s.fullest].total;
  const fits = s.fits ? s.held_down ? ", held down to fit" : "" : ", too much";
  return [...cells, s.recompute + offloadWords(s.offload), exact(total, gib(total) + fits)];
}

function fillNumbers() {
  const base = baselineOf() ? baselineOf().makespan : 0, shared = data.context_baseline;
  const memory = data.schedules.some(s => s.memory);
  const names = ["schedule", unit === "s" ? "seconds, estimated" : unit, "x as fast", "idle", "replays"];
  if (!memory) names.push("kept chunks", "state tokens");
  const speed = data.schedules.some(s => s.tokens_per_second_a_gpu);
  if (speed) names.push("tokens/s a GPU", "MFU");
  const streams = data.schedules.some(s => s.stream_waits > 0);
  if (streams) names.push("waits for state");
  byId("numbers").append(head(memory ? [...names, "recompute", "fullest GPU"] : names));
  if (shared) {
    const cells = [data.context_words, exact(base, shown(base)), exact(1, estimate(1)),
      exact(shared.bubble_useful, percent(shared.bubble_useful)), "-"];
    for (let i = 0; i < (speed ? 2 : 0) + (streams ? 1 : 0); i++) cells.push("-");
    byId("numbers").append(row([...cells, shared.recompute + offloadWords(shared.offload),
      exact(shared.bytes, gib(shared.bytes))]));
  }
  data.schedules.forEach((s, i) => byId("numbers").append(
    row(numberCells(s, base, memory, streams, speed), i === data.best ? {class: "chosen"} : {})));
  keepOnNarrow(byId("numbers"), [names[0], names[1], "x as fast", "kept chunks", "fullest GPU"]);
  byId("numbers-note").append(...numbersNote(memory, speed, streams));
}

// Explains the names that occur in the table.
function numbersNote(memory, speed, streams) {
  const has = part => data.schedules.some(s => s.name.includes(part));
  const lines = [
    [has("paper"), "paper", "the order of passes that the ChunkFlow paper gives"],
    [has("zero-bubble"), "zero-bubble", "each backward in two parts, its input gradient (I) at once and its weight "
      + "gradient (W) where the stage would wait"],
    [has("best"), "best", "the shortest order that a search found"],
    [has("I + W"), "best, I + W", "such a search with backwards in two parts"],
    [data.part && baselineOf(), "x as fast",
      "as whole sequences in this split of the GPUs, which the comparison above may not take"],
    [true, "idle, replays", "of the time of all stages"],
    [!memory, "kept chunks", "the most at once on a stage whose activations are kept"],
    [!memory, "state tokens", "the most at once on a stage whose K and V are kept"],
    [speed, "tokens/s a GPU", "of the list's sequences; what they share counts for each of them"],
    [speed, "MFU", "the model's own arithmetic, of what the GPU could do in that time"],
    [streams, "waits for state", "the time in which passes wait for K and V from host memory"],
    [memory, "recompute", "what backwards make again to save memory"]];
  const wide = ["idle, replays", "state tokens", "tokens/s a GPU", "MFU", "waits for state", "recompute"]; // see keepOnNarrow
  return lines.filter(([there]) => there).map(([, name, text]) => element("span",
    wide.includes(name) ? {class: "minor"} : {}, element("strong", {}, name), `: ${text}. `));
}

// ---- other options ----

function tryCells(t) {
  const less = t.makespan / data.schedules[data.best].makespan - 1;
  return [element("code", {}, t.options), exact(t.makespan, shown(t.makespan)), exact(less, percent(less)),
    exact(t.memory, gib(t.memory) + (t.fits ? "" : ", too much")),
    t.pays ? "pays" : t.fits ? "does not pay" : "does not fit"];
}

function fillTried() {
  if (!data.tried || !data.tried.length) return;
  byId("tried-part").hidden = false;
  byId("tried").append(head(["with these options too", unit === "s" ? "seconds, estimated" : unit,
    "against the best above", "fullest GPU", "verdict"]));
  for (const t of data.tried) byId("tried").append(row(tryCells(t), t.pays ? {class: "chosen"} : {}));
  keepOnNarrow(byId("tried"), ["with these options too", "against the best above", "verdict"]);
}

// ---- the controls of the chart ----

function scheduleButton(s, i) {
  const input = element("input", {type: "radio", name: "schedule", value: i});
  const options = isDrawn(i) ? {} : {title: "too many passes to be drawn: " + count(s.n_passes)};
  input.checked = i === state.schedule;
  input.disabled = !isDrawn(i);
  return element("label", options, input, element("span", {}, s.name));
}

function fillControls() {
  byId("schedules").append(...data.schedules.map(scheduleButton));
  byId("beside").append(element("option", {value: -1}, "nothing"),
    ...drawable.map(i => element("option", {value: i}, data.schedules[i].name)));
  byId("beside").value = String(state.beside);
}

// Returns the kinds of passes that are drawn.
function lettersShown() {
  const stages = panels().flatMap(i => data.schedules[i].stages);
  return [...LETTERS].filter(letter => stages.some(stage => stage.pass.includes(letter)
    || stage.pass.includes(letter.toLowerCase())));
}

const HATCHED = "repeating-linear-gradient(135deg, rgba(0, 30, 90, 0.35) 0 1px, transparent 1px 4px), var(--R)";
const isDrawnAnywhere = holds => panels().some(i => holds(scheduleAt(i)));

function fillLegends() {
  const legend = byId("legend"), add = (fill, text) => legend.append(element("span", {}, swatch(fill), text));
  legend.textContent = "";
  if (state.schedule < 0) return;
  if (state.colours === "pass") {
    for (const letter of lettersShown())
      add(letter === "R" ? HATCHED : `var(--${letter})`, letter + " " + PASS_NAMES[letter]);
    if (isDrawnAnywhere(s => s.plan.chunks.chain.some(chain => chain >= 0)))
      add("linear-gradient(var(--chain0) 3px, var(--F) 3px)", "part of a long sequence, in its hue");
    if (isDrawnAnywhere(s => s.from.stages.some(stage => /[fr]/.test(stage.pass))))
      add("linear-gradient(var(--F) 8px, var(--lane) 8px 10px, var(--F) 10px)", "activations dropped");
  } else {
    add("var(--chain0)", "a hue for each long sequence");
    add("var(--alone)", "standalone: whole sequences");
  }
  const isSeen = i => panels().some(p => data.schedules[p].idle.some(stage => stage[i] > 0));
  if (state.bubbles === "cause")
    data.causes.forEach((name, i) => isSeen(i) && add(`var(--cause${i})`, "idle: " + name));
  else add("var(--lane)", "idle");
  if (state.critical) add("var(--mark)", "line: the critical path");
  fillMemoryLegend();
}

// Fills in the legend; if lines are few, their names are next to them in the chart instead.
function fillMemoryLegend() {
  const legend = byId("memory-legend"), n = data.schedules[state.schedule].stages.length;
  legend.textContent = "";
  for (let i = 0; i < n && n > MOST_NAMED && n <= 16; i++)
    legend.append(element("span", {}, swatch(stageColour(i, n)), "stage " + i));
}

// ---- memory by term ----

function heldWords(s) {
  if (s.memory) return "GiB of one GPU";
  return data.held === "bytes" ? "bytes of --token-bytes"
    : "tokens whose activations are kept (with --model it is GiB)";
}

function fillTerms() {
  const s = data.schedules[state.schedule], box = byId("terms");
  box.textContent = "";
  if (!s) return;
  const own = isDrawn(state.schedule) ? scheduleAt(state.schedule) : null;
  const limit = own && !shownLimit(own) ? limitOf(own) : null;
  byId("memory-caption").textContent = `${s.name}: what each stage holds while a pass runs, in ${heldWords(s)}.`
    + (limit ? ` The limit: ${limit.name}.` : "");
  box.parentElement.hidden = !s.memory;
  if (!s.memory) return;
  const keys = Object.keys(data.terms).filter(key => s.memory.some(m => m[key] > 0));
  const cells = key => s.memory.map(m => exact(m[key], gib(m[key])));
  const table = element("table", {id: "terms-table"}, head(["at its peak", ...s.memory.map((_, i) => "stage " + i)]));
  for (const key of keys) table.append(row([data.terms[key], ...cells(key)]));
  table.append(row(["in all", ...cells("total")], {class: "chosen"}));
  box.append(element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Memory by term"}, table));
}

// ---- idle time by cause ----

const sumOf = numbers => numbers.reduce((sum, x) => sum + x, 0);

// Draws a stage's time as one bar: passes, and each cause of idling.
function idleBar(s, stage) {
  const bar = element("div", {class: "bar"}), busy = 1 - sumOf(stage) / s.makespan;
  const add = (part, fill, title) => {
    if (part > 0) bar.append(element("i", {style: {width: 100 * part + "%", background: fill}, title}));
  };
  add(busy, "var(--busy)", "passes: " + percent(busy));
  stage.forEach((seconds, c) => add(seconds / s.makespan, `var(--cause${c})`,
    `${data.causes[c]}: ${time(seconds)}, ${percent(seconds / s.makespan)}`));
  return bar;
}

function fillIdle() {
  const s = data.schedules[state.schedule], box = byId("idle-bars"), table = byId("idle-table"), mostBars = 64;
  box.textContent = table.textContent = "";
  if (!s) return;
  const whole = s.makespan * s.idle.length || 1;
  const sums = data.causes.map((_, c) => sumOf(s.idle.map(stage => stage[c]))), idle = sumOf(sums);
  const cells = x => [exact(x, s.measured ? count(x) : shown(x)), exact(x / whole, percent(x / whole))];
  byId("idle-sentence").textContent = `${s.name}: the stages are idle for ${percent(idle / whole)} of the time`
    + (s.replayed > 0 ? `, and replay dropped chunks for ${percent(replayShare(s))}` : "") + ".";
  s.idle.slice(0, mostBars).forEach((stage, i) => box.append(element("span", {}, "stage " + i), idleBar(s, stage)));
  table.append(head(["cause", unit === "s" ? "seconds, all stages" : unit + ", all stages", "of all stage time"]));
  data.causes.forEach((name, c) => {
    const words = element("td", {class: "words"}, swatch(`var(--cause${c})`), name, element("small", {}, CAUSES[name]));
    if (sums[c] > 0) table.append(row([words, ...cells(sums[c])]));
  });
  table.append(row(["in all", ...cells(idle)], {class: "chosen"}));
}

// ---- ranks, and a measurement ----

const rankBar = part => element("div", {class: "bar", style: {width: "120px"}, title: percent(part)},
  element("i", {style: {width: 100 * part + "%", background: "var(--bar)"}}));

function rankCells(r, i, slowest, memory) {
  const cells = [String(i), exact(r.chunks, count(r.chunks)), exact(r.tokens, count(r.tokens)),
    exact(r.pairs, count(r.pairs))];
  if (r.makespan === undefined) cells.push("-", "-", "-");
  else cells.push(exact(r.makespan, shown(r.makespan)), rankBar(r.makespan / slowest),
    exact(r.bubble_useful, percent(r.bubble_useful)));
  if (memory) cells.push(r.memory ? exact(r.memory, gib(r.memory)) : "-");
  return cells;
}

function fillRanks() {
  if (!data.ranks) return;
  const times = data.ranks.filter(r => r.makespan !== undefined).map(r => r.makespan), slowest = Math.max(...times);
  const mean = sumOf(times) / times.length, memory = data.ranks.some(r => r.memory), table = byId("ranks");
  byId("ranks-section").hidden = false;
  if (times.length)
    byId("ranks-sentence").textContent = `All ranks wait for the slowest: ${shownTime(slowest)}, `
      + `${estimate(slowest / mean)} times the mean (schedule ${data.rank_schedule}).`;
  table.append(head(["rank", "chunks", "tokens", "attention pairs", unit === "s" ? "seconds" : unit, "of the slowest",
    "idle, replays too", ...(memory ? ["fullest GPU"] : [])]));
  data.ranks.forEach((r, i) =>
    table.append(row(rankCells(r, i, slowest, memory), i === data.rank ? {class: "chosen"} : {})));
  keepOnNarrow(table, ["rank", "tokens", "seconds", unit, "fullest GPU"]);
}

function errorCells(e) {
  const off = e.predicted / e.measured - 1;
  return [e.pass + " " + PASS_NAMES[e.pass], exact(e.n, count(e.n)), exact(e.measured, time(e.measured)),
    exact(e.predicted, time(e.predicted)), e.measured > 0 ? exact(off, percent(off)) : "-",
    exact(e.off, percent(e.off))];
}

function fillErrors() {
  if (!isDrawn(data.measured)) return;
  const predicted = data.schedules[data.predicted].makespan, measured = data.schedules[data.measured].makespan;
  byId("measured-section").hidden = false;
  byId("measured-sentence").textContent = `Measured ${time(measured)}, predicted ${time(predicted)}: `
    + `${percent(predicted / measured - 1)} off. Both are in the chart above, one over the other.`;
  byId("errors").append(head(["pass", "how many", "measured", "predicted", "sum off by", "each off by, on average"]),
    ...data.errors.map(e => row(errorCells(e))));
  keepOnNarrow(byId("errors"), ["pass", "measured", "predicted", "sum off by"]);
}

// ---- choosing ----

// Applies a change to the drawing. If the whole time axis was visible before, the whole new one is visible afterwards.
function redraw(change) {
  const whole = state.from <= 0 && state.to >= span();
  change();
  if (whole) show(0, span());
  else show(state.from, state.to);
}

function choose(index) {
  if (!isDrawn(index)) return;
  redraw(() => state.schedule = index);
  state.focus = null;
  showTip("");
  if (state.chain && data.schedules[index].plan !== state.chain.plan) state.chain = null;
  for (const input of document.querySelectorAll("#schedules input")) input.checked = Number(input.value) === index;
  focusOn(null);
  request("gantt", "memory", "chunks");
  fillLegends();
  fillTerms();
  fillIdle();
}

function listenToControls() {
  const on = (id, kind, action) => byId(id).addEventListener(kind, action);
  const take = key => event => {
    state[key] = event.target.value;
    request("gantt");
    fillLegends();
  };
  on("colours", "change", take("colours"));
  on("bubbles", "change", take("bubbles"));
  on("critical", "change", toggleCritical);
  on("beside", "change", event => {
    redraw(() => state.beside = Number(event.target.value));
    fillLegends();
    request("gantt");
  });
  on("schedules", "change", event => choose(Number(event.target.value)));
  on("find", "change", event => findChunk(Number(event.target.value)));
  on("save-svg", "click", saveChart);
  on("zoom-in", "click", () => zoom(1.6, middle()));
  on("zoom-out", "click", () => zoom(1 / 1.6, middle()));
  on("zoom-fit", "click", () => show(0, span()));
}

// Redraws everything, because a canvas's colours do not follow the style sheet by themselves.
function redrawAll() {
  readColours(data.causes.length);
  fillLegends();
  fillTerms();
  fillIdle();
  for (const paint of Object.values(painters)) paint();
}

function startReport() {
  byId("report-page").hidden = false;
  readColours(data.causes.length);
  fillHeader();
  fillNumbers();
  fillTried();
  fillLengths();
  fillBatch();
  fillControls();
  fillRanks();
  fillErrors();
  listenToChart();
  listenToChunks();
  listenToControls();
  addEventListener("resize", () => request("gantt", "memory", "chunks"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  addEventListener("beforeprint", redrawAll);
  addEventListener("afterprint", redrawAll);
  if (state.schedule >= 0) choose(state.schedule);
  request("chunks");
}
