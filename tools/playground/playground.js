// playground.js - settings that are a command line, and the report's charts of what the command answers to it.

const LIST = "lengths.txt", MOST_SEQUENCES = 50000;
const powers = (from, to) => Array.from({length: to - from + 1}, (_, i) => shortCount(2 ** (from + i)));
const upTo = n => Array.from({length: n}, (_, i) => String(i + 1));

// The settings: options of `chunkflow report` with what their sliders go through. An empty one is not given.
const OPTIONS = [
  {name: "chunk-size", words: "ChunkSize, tokens", steps: powers(8, 18), value: "8K"},
  {name: "k", words: "K, chunks of a sequence that are kept", steps: ["", ...upTo(16)], value: ""},
  {name: "stages", words: "pipeline stages", steps: upTo(16), value: "4"},
  {name: "virtual", words: "virtual stages of each", steps: ["", ...upTo(8)], value: ""},
  {name: "ranks", words: "data-parallel ranks", steps: upTo(16), value: "1"},
  {name: "limit", words: "limit, chunks that a stage keeps", steps: ["", ...upTo(32), "none"], value: ""},
  {name: "schedule", words: "schedule", choices: ["best", "paper", "1f1b", "gpipe", "interleaved", "zero-bubble"], value: "best"},
  {name: "split-backward", words: "cut backwards in two", flag: true, value: ""},
  {name: "model", words: "model", choices: [""], empty: "none: token times", value: ""},
  {name: "gpu", words: "GPU", choices: [""], empty: "none", value: ""},
  {name: "tp", words: "tensor parallel", steps: ["", "1", "2", "4", "8"], value: ""}
];

// The lists that can be drawn: arguments of `chunkflow gen` for n sequences, and lines to add to its output.
const DRAWN = [
  {name: "chat", words: "chats and one long document", more: "128K\n",
    args: n => ["lmsys", "--n", Math.max(1, n - 1), "--max", "8K"]},
  {name: "service", words: "requests of a service", more: "",
    args: n => ["lognormal", "--n", n, "--median", "1500", "--sigma", "1.2", "--max", "32K"]},
  {name: "grpo", words: "GRPO: 16 answers to each prompt", more: "",
    args: n => ["lognormal", "--n", Math.max(1, Math.round(n / 16)), "--branches", "16", "--median", "900"]}
];

const inputs = {};                     // by option: what holds its value
const seen = {                         // what the page is about
  drawn: "", text: "", seed: 1,        // what was drawn, and the list that came of it
  draws: 0,                            // how often one was asked for
  settled: null, args: "",             // the last answer to a setting that was let go: its figures and arguments
  data: null, id: 0,
  isOpened: false,                     // whether it is the report of a file
  answers: 0, answer: null             // how many answers were shown, and the last one
};

// ---- the command ----

async function compileProgram() {
  const packed = Uint8Array.from(atob(byId("program").textContent.replace(/\s/g, "")), c => c.charCodeAt(0));
  const bytes = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return WebAssembly.compile(await new Response(bytes).arrayBuffer());
}

const engine = {module: null, worker: null, asked: new Map(), address: ""};

function startWorker() {
  for (const take of engine.asked.values()) take(null);
  engine.asked.clear();
  if (engine.worker) engine.worker.terminate();
  engine.address = engine.address || URL.createObjectURL(new Blob([byId("engine").textContent], {type: "text/javascript"}));
  engine.worker = new Worker(engine.address);
  engine.worker.postMessage({module: engine.module});
  engine.worker.onmessage = ({data: answer}) => {
    const take = engine.asked.get(answer.id);
    engine.asked.delete(answer.id);
    if (take) take(answer);
  };
}

// Runs the command: {code, out, said, seconds}; null if it was given up for another setting.
function runCommand(args, files) {
  return new Promise(take => {
    engine.asked.set(++seen.id, take);
    engine.worker.postMessage({id: seen.id, args: args.map(String), files});
  });
}

// ---- from settings to an answer ----

function optionWords(separator) {
  const words = [];
  for (const {name, flag} of OPTIONS) {
    const value = inputs[name].value.trim();
    if (value !== "") words.push(flag ? ["--" + name] : separator ? ["--" + name + separator + value] : ["--" + name, value]);
  }
  return words.flat();
}

const update = {running: false, next: null, begun: 0};
const PATIENCE = 700; // milliseconds after which a run is given up for another setting

// Gives the run up that began then, once it has taken too long and another setting waits.
function giveUpLater(begun) {
  const isWaiting = () => update.running && update.begun === begun && update.next;
  if (isWaiting()) setTimeout(() => isWaiting() && startWorker(), Math.max(0, begun + PATIENCE - performance.now()));
}

// Asks for what the settings say now. isPreview: while one drags, with a search that tries one candidate.
async function ask(isPreview) {
  update.next = {isPreview, args: optionWords("="), list: byId("list").value};
  giveUpLater(update.begun);
  if (update.running || !engine.module) return;
  update.running = true;
  while (update.next) {
    const asked = update.next;
    update.next = null;
    update.begun = performance.now();
    const args = ["report", ...asked.args, ...(asked.isPreview ? ["--max-tries", "1"] : []),
      "--max-sequences", MOST_SEQUENCES, "--json", "-", LIST];
    if (!asked.isPreview) {
      tellProblem("");
      byId("preview").textContent = "searching ...";
    }
    const answer = await runCommand(args, {[LIST]: asked.list});
    try {
      if (answer) takeAnswer(asked, answer);
    } catch (error) {
      tellProblem("this page cannot show the answer: " + error.message);
    }
  }
  update.running = false;
}

function takeAnswer(asked, answer) {
  tellProblem(answer.code === 0 ? "" : answer.said);
  byId("seen").classList.toggle("stale", answer.code !== 0);
  if (answer.code !== 0) {
    byId("preview").textContent = "not for these settings";
    return;
  }
  const before = seen.settled, words = asked.isPreview ? "preview: a search of one try" : "the command's own answer";
  seen.isOpened = false;
  showReport(JSON.parse(answer.out), asked.isPreview, asked.args.join("\n") + asked.list);
  byId("preview").textContent = `${words}, ${Math.round(1000 * answer.seconds)} ms`;
  seen.answers++;
  seen.answer = {...asked, seconds: answer.seconds, out: answer.out};
  if (asked.isPreview) return;
  fillLink();
  if (byId("codes").open) fillCodes();
  if (!before) performance.mark("chunkflow-drawn");
}

// ---- what goes wrong ----

const problemOf = name => byId(name + "-problem") || byId("problem");

// Puts the command's words beside the setting that they name first.
function tellProblem(said) {
  for (const place of document.querySelectorAll(".problem")) {
    place.hidden = true;
    place.textContent = "";
  }
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  if (!said) return;
  const text = said.trim().replace(/^chunkflow( report)?: /, "").replace(/ \(see chunkflow report --help\)$/, "");
  const named = (text.match(/--[a-z-]+/g) || []).map(word => word.slice(2)).find(name => inputs[name]);
  const at = text.startsWith(LIST) ? "list" : named || "";
  const place = problemOf(at);
  place.hidden = false;
  place.textContent = text;
  const input = at === "list" ? byId("list") : inputs[at];
  if (input) input.setAttribute("aria-invalid", "true");
}

// ---- an answer on the page ----

const chosenOf = report => report.schedules.findIndex(s => !s.unsplit);

function figuresOf(report) {
  const s = report.schedules[chosenOf(report)], base = baselineOf();
  const bytes = s.memory ? s.memory[s.fullest].total : 0;
  const tokens = Math.max(0, ...(s.peak_tokens || [0])) / s.virtual_stages;
  const [gain, rest] = base ? pace(base.makespan, s.makespan, [0, 0]) : ["-", "whole sequences cannot be run"];
  return {unit: report.unit, kind: s.memory ? "bytes" : "tokens", figures: [
    {name: "makespan", value: s.makespan, text: shownTime(s.makespan)},
    {name: "idle", value: s.bubble_busy, text: percent(s.bubble_busy),
      note: `with replays ${percent(s.bubble_busy + replayShare(s))}`},
    {name: s.memory ? "fullest GPU" : "peak, tokens kept on a stage", value: s.memory ? bytes : tokens,
      text: s.memory ? gib(bytes) + (s.fits ? "" : ", too much") : count(tokens)},
    {name: "beside whole sequences", text: gain, note: rest.trim()}]};
}

// "was 46, 8.7 % less".
function changeWords(before, now) {
  if (!before || before.value === undefined || before.value === now.value) return "";
  const part = before.value > 0 ? (now.value / before.value - 1) * 100 : NaN;
  return `was ${before.text}` + (Number.isFinite(part) ? `, ${Math.abs(part).toFixed(1)} % ${part < 0 ? "less" : "more"}` : "");
}

function fillFigures(now) {
  const before = seen.settled, same = before && before.unit === now.unit && before.kind === now.kind;
  byId("figures").replaceChildren(...now.figures.map((figure, i) => element("div", {}, element("dt", {}, figure.name),
    element("dd", {}, figure.value === undefined ? figure.text : exact(figure.value, figure.text),
      element("small", {}, [changeWords(same ? before.figures[i] : null, figure), figure.note].filter(Boolean).join("; "))))));
}

// Draws at once, so that a report from elsewhere that cannot be drawn is noticed here.
function drawReport(report) {
  takeData(report);
  const chosen = chosenOf(data);
  if (chosen < 0) throw new Error("it has no schedule of chunks");
  state.schedule = chosen;
  state.beside = data.schedules.findIndex(s => s.unsplit);
  const figures = figuresOf(data);
  readColours(data.causes.length);
  fillLengths();
  fillBatch();
  byId("pipeline-title").textContent = data.sentence;
  for (const id of ["gantt", "memory"]) byId(id).hidden = !isDrawn(chosen);
  if (isDrawn(chosen)) choose(chosen);
  else byId("details").textContent = `${count(data.schedules[chosen].n_passes)} passes are too many to be drawn.`;
  for (const paint of Object.values(painters)) paint();
  return figures;
}

function showReport(report, isPreview, args) {
  const figures = drawReport(report);
  fillFigures(figures);
  seen.data = report;
  if (!isPreview && args !== seen.args) [seen.settled, seen.args] = [figures, args];
}

// ---- lists that are drawn ----

const drawnCount = () => Math.max(1, Math.min(MOST_SEQUENCES, Math.round(Number(byId("drawn-n").value)) || 64));

async function draw(seed) {
  const what = DRAWN.find(d => d.name === byId("drawn").value);
  if (!what) return;
  const turn = ++seen.draws;
  seen.seed = seed;
  if (update.running && performance.now() - update.begun > PATIENCE) startWorker();
  const answer = await runCommand(["gen", ...what.args(drawnCount()), "--seed", seed], {});
  if (turn !== seen.draws) return;
  if (!answer) return draw(seed); // it was given up together with a run that took too long
  if (answer.code !== 0) {
    tellProblem(answer.said);
    return;
  }
  seen.drawn = what.name;
  seen.text = byId("list").value = answer.out + what.more;
  ask(false);
}

// ---- a link ----

const MOST_LINKED = 16000; // characters of a list that a link carries

function linkWords() {
  const words = new URLSearchParams(), list = byId("list").value;
  for (const {name, value} of OPTIONS) if (inputs[name].value !== value) words.set(name, inputs[name].value);
  if (seen.drawn && list === seen.text) {
    words.set("draw", seen.drawn);
    words.set("n", String(drawnCount()));
    words.set("seed", String(seen.seed));
  } else if (list.length <= MOST_LINKED) words.set("list", list);
  return words.toString();
}

function fillLink() {
  history.replaceState(null, "", "#" + linkWords());
  byId("link-note").textContent = location.hash.includes("draw=") || location.hash.includes("list=") ? ""
    : "The list is too long for a link, which carries the other settings alone.";
}

// Takes what a link says; what it does not name stays as it is by default.
function takeLink() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const {name, value} of OPTIONS) setOption(name, words.has(name) ? words.get(name) : value);
  if (words.has("list")) byId("list").value = words.get("list");
  byId("drawn").value = DRAWN.some(d => d.name === words.get("draw")) ? words.get("draw") : words.has("list") ? "" : DRAWN[0].name;
  byId("drawn-n").value = /^[0-9]+$/.test(words.get("n") || "") ? Math.min(MOST_SEQUENCES, Number(words.get("n"))) : 64;
  return words.has("list") ? ask(false) : draw(/^[0-9]{1,15}$/.test(words.get("seed") || "") ? Number(words.get("seed")) : 1);
}

// ---- the same as code ----

// The lengths of a plan's sequences, from its slices.
function lengthsOf(plan) {
  const lengths = new Array(plan.n_sequences).fill(0);
  for (const chunk of plan.chunks)
    for (const slice of chunk.slices)
      lengths[slice.sequence] = Math.max(lengths[slice.sequence], slice.begin + slice.length);
  return lengths;
}

const hasTrees = plan => plan.chunks.some(chunk => chunk.slices.some(slice => slice.n > 1));

function folded(numbers, indent) {
  let lines = [""];
  for (const n of numbers) {
    if (lines[lines.length - 1].length > 96) lines.push("");
    lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + n + ",";
  }
  return lines.join("\n" + indent).replace(/,$/, "");
}

// A whole number as the command reads it: 6K is 6144.
function countOf(word) {
  const [, digits, suffix] = /^([0-9]+)(.?)$/.exec(word);
  return Number(digits) * 1024 ** " KMGT".indexOf(suffix.toUpperCase() || " ");
}

// The limit in chunks as the library counts it, which is over all virtual stages; "" where none was given.
function limitWords(s, none) {
  const limit = inputs.limit.value.trim();
  return limit === "" ? "" : limit === "none" ? none : String(countOf(limit) * s.virtual_stages);
}

// Token times are those of a whole stage, and the library's unit costs those of a virtual stage.
const unitsOf = s => s.virtual_stages > 1 && unit !== "s" ? " / " + s.virtual_stages : "";

function codeInC(lengths, s) {
  const model = inputs.model.value && inputs.gpu.value, limit = limitWords(s, "CF_NO_LIMIT"), tp = inputs.tp.value || "1";
  const stages = data.n_stages * s.virtual_stages, upper = word => word.toUpperCase().replace(/-/g, "_");
  return `#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
${model ? '#define CHUNKFLOW_TUNE_IMPLEMENTATION\n#include "chunkflow_tune.h"\n' : ""}#include <stdio.h>

int main(void) {
    static const int64_t lengths[] = {
        ${folded(lengths, "        ")}};
    cf_pack_desc packing = {.chunk_size = ${data.chunk_size}, .n_ranks = ${data.n_ranks}};
    cf_schedule_desc order = {.kind = CF_SCHEDULE_${upper(s.kind)}, .shape = {.n_stages = ${data.n_stages}, .k = ${s.k}${
      s.virtual_stages > 1 ? `, .n_virtual = ${s.virtual_stages}` : ""}${data.rank ? `, .rank = ${data.rank}` : ""}}${
      limit ? `, .limits = {.chunks = ${limit}}` : ""}${inputs["split-backward"].value ? ", .split_backward = 1" : ""}};
    cf_simulate_desc clock = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    cf_result result = cf_pack(lengths, ${lengths.length}, &packing, &plan, &error);
${model ? `    /* The command also keeps best to the GPU's bytes: see cf_memory_limits. */
    cf_cost_desc cost = {.model = cf_model_find("${inputs.model.value}"), .gpu = cf_gpu_find("${inputs.gpu.value}"),
                         .parallel = {.tp = ${tp}, .pp = ${data.n_stages}, .dp = ${data.n_ranks}, .n_virtual = ${
      s.virtual_stages}}, .chunk_size = ${data.chunk_size}};
    cf_stage_cost stages[${stages}];
    cf_timing timing;
    if (result == CF_OK) result = cf_cost_estimate(&cost, stages, ${stages}, &timing, NULL, &error);
    order.timing = clock.timing = &timing;
` : ""}    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, &error);
    if (result == CF_OK) result = cf_simulate(plan, schedule, &clock, &timeline, &error);
    if (result == CF_OK) printf("%.17g\\n", timeline->makespan${unitsOf(s)});
    else fprintf(stderr, "%s\\n", error.text);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result != CF_OK;
}
`;
}

function codeInPython(lengths, s) {
  const limit = limitWords(s, "chunkflow.lib.CF_NO_LIMIT"), model = inputs.model.value && inputs.gpu.value;
  return `import chunkflow

lengths = [
    ${folded(lengths, "    ")}]
plan = chunkflow.pack(lengths, chunk_size=${data.chunk_size}, n_ranks=${data.n_ranks})
schedule = plan.schedule(kind="${s.kind}", n_stages=${data.n_stages}, k=${s.k}${
    s.virtual_stages > 1 ? `, n_virtual=${s.virtual_stages}` : ""}${data.rank ? `, rank=${data.rank}` : ""}${limit ? `, limits={"chunks": ${limit}}` : ""}${
    inputs["split-backward"].value ? ", split_backward=1" : ""})
${model ? "# in token times: pass timing= for seconds, from chunkflow_tune.h as in C\n" : ""}print(schedule.simulate().makespan${unitsOf(s)})
`;
}

const shellWord = word => /^[\w+=.\/:,@-]+$/.test(word) ? word : "'" + word.replace(/'/g, "'\\''") + "'";

async function fillCodes() {
  if (seen.isOpened) {
    for (const id of ["code-command", "code-c", "code-python"])
      byId(id).textContent = "This report came without its list of lengths; a changed setting comes back to yours.";
    return;
  }
  byId("code-command").textContent =
    `chunkflow report ${optionWords("").map(shellWord).join(" ")} -o report.html ${LIST}\n`;
  const pack = ["pack", "--chunk-size=" + inputs["chunk-size"].value, "--ranks=" + (inputs.ranks.value || 1), "--json", "-", LIST];
  const answer = await runCommand(pack, {[LIST]: byId("list").value}), s = data.schedules[chosenOf(data)];
  if (!answer || answer.code !== 0) return;
  const plan = JSON.parse(answer.out), trees = hasTrees(plan);
  for (const [id, write] of [["code-c", codeInC], ["code-python", codeInPython]])
    byId(id).textContent = trees ? "sequences that share a prompt: see tools/guide/shared-prompts.md" : write(lengthsOf(plan), s);
}

// ---- files ----

const opened = {plan: null};

async function openFiles(files) {
  byId("opened").hidden = true;
  for (const file of files) {
    try {
      await openText(file.name, await file.text(), file);
    } catch (error) {
      tellProblem(`${file.name}: is not what chunkflow writes: ${error.message}`);
    }
  }
}

// A report is drawn. A plan is checked, and its lengths become the list if it has no trees; a schedule is checked with it.
// Anything that is no JSON is a list.
async function openText(name, text, file) {
  if (/\.idx$/.test(name)) {
    const answer = await runCommand(["lengths", "--unit", "tokens", "data.idx"], {"data.idx": new Uint8Array(await file.arrayBuffer())});
    if (answer) takeList(answer.code === 0 ? answer.out : null, answer.said);
    return;
  }
  if (!/^\s*\{/.test(text)) {
    takeList(text);
    return;
  }
  const json = JSON.parse(text);
  if (json.format === "chunkflow-report") {
    openReport(name, json);
    return;
  }
  const isPlan = json.format === "chunkflow-plan", isSchedule = json.format === "chunkflow-schedule";
  if (/^chunkflow-/.test(json.format) && !isPlan && !isSchedule) {
    tellProblem(`${name}: its format is ${json.format}. This page opens files of report, plan and schedule.`);
    return;
  }
  if (isSchedule && !opened.plan) {
    tellProblem(`${name}: open the plan of this schedule first (plan --plan-json).`);
    return;
  }
  const plan = isPlan ? text : opened.plan;
  const args = isPlan || !plan ? ["file.json"] : ["--plan", "plan.json", "--chart", "--color", "never", "file.json"];
  const answer = await runCommand(["check", ...args], {"file.json": text, ...(plan ? {"plan.json": plan} : {})});
  if (!answer) return;
  byId("opened").hidden = false;
  byId("opened-text").textContent = `${name}\n${answer.out}${answer.said}`;
  byId("opened").scrollIntoView();
  if (!isPlan || answer.code !== 0) return;
  opened.plan = text;
  if (hasTrees(json)) return;
  setOption("chunk-size", String(json.chunk_size));
  setOption("ranks", String(json.n_ranks));
  takeList(lengthsOf(json).join("\n") + "\n");
}

function takeList(text, said) {
  if (text === null) tellProblem(said);
  else {
    byId("list").value = text;
    ask(false);
  }
}

// Opens a report. If it cannot be drawn, the page stays as it is.
function openReport(name, json) {
  const before = seen.data;
  try {
    showReport(json, true, "");
    seen.isOpened = true;
    if (byId("codes").open) fillCodes();
    tellProblem("");
    byId("seen").classList.remove("stale");
    byId("preview").textContent = `opened: ${name}. The settings beside it are not its own.`;
  } catch (error) {
    if (before) showReport(before, true, "");
    throw error;
  }
}

// ---- the controls ----

function setOption(name, value) {
  const input = inputs[name], option = OPTIONS.find(o => o.name === name);
  if (option.choices && ![...input.options].some(o => o.value === value)) input.append(element("option", {value}, value));
  input.value = value;
  if (input.follow) input.follow();
}

// A slider writes into the text beside it, which is what counts.
function sliderOf(option, id) {
  const text = element("input", {id, size: "6", placeholder: "default", "aria-describedby": option.name + "-problem"});
  const range = element("input", {type: "range", min: 0, max: option.steps.length - 1, step: 1, "aria-label": option.words});
  text.follow = () => {
    const at = option.steps.indexOf(text.value.trim());
    if (at >= 0) range.value = at;
    range.setAttribute("aria-valuetext", text.value || "default");
  };
  range.addEventListener("input", () => {
    text.value = option.steps[range.value];
    range.setAttribute("aria-valuetext", text.value || "default");
    ask(true);
  });
  range.addEventListener("change", () => ask(false));
  text.addEventListener("input", () => {
    text.follow();
    ask(true);
  });
  text.addEventListener("change", () => ask(false));
  return [text, [range, text]];
}

function choiceOf(option, id) {
  const made = element("select", {id, "aria-describedby": option.name + "-problem"},
    ...option.choices.map(value => element("option", {value}, value || option.empty)));
  made.addEventListener("change", () => ask(false));
  return [made, [made]];
}

// A flag's value is "1" or "", as that of the others is a text.
function flagOf(option, id) {
  const made = element("input", {id, type: "checkbox"}), held = {
    get value() { return made.checked ? "1" : ""; },
    set value(value) { made.checked = value !== ""; },
    setAttribute: (...pair) => made.setAttribute(...pair)
  };
  made.addEventListener("change", () => ask(false));
  return [held, [made]];
}

function addOption(option) {
  const id = "option-" + option.name;
  const [input, parts] = option.steps ? sliderOf(option, id) : option.flag ? flagOf(option, id) : choiceOf(option, id);
  inputs[option.name] = input;
  byId("options").append(element("div", {class: "setting"}, element("label", {for: id}, option.words),
    element("div", {class: "line"}, ...parts), element("p", {id: option.name + "-problem", class: "problem", role: "alert", hidden: ""})));
}

// The names that an option takes are those that the command lists when it refuses one.
async function fillNames(name, others) {
  const answer = await runCommand(["report", "--chunk-size", "1", ...others, "--" + name, "?", "--json", "-", LIST], {[LIST]: "1\n"});
  const list = /There are: ([^\n]*?)(\. Any other|\.? \(see|\n)/.exec(answer.said);
  for (const value of list ? list[1].split(", ") : []) inputs[name].append(element("option", {value}, value));
}

function listenToFiles() {
  const page = byId("playground");
  byId("file").addEventListener("change", event => {
    openFiles([...event.target.files]).then(() => event.target.value = "");
  });
  const over = on => event => {
    event.preventDefault();
    page.classList.toggle("dropping", on);
  };
  addEventListener("dragover", over(true));
  addEventListener("dragleave", over(false));
  addEventListener("drop", event => {
    over(false)(event);
    openFiles([...event.dataTransfer.files]);
  });
}

async function copyLink() {
  fillLink();
  try {
    await navigator.clipboard.writeText(location.href);
    byId("link-note").textContent = "copied";
  } catch (error) {
    byId("link-note").textContent = "The link is the address of this page.";
  }
}

function listen() {
  const on = (id, kind, action) => byId(id).addEventListener(kind, action);
  on("settings", "submit", event => event.preventDefault());
  on("list", "input", () => ask(true));
  on("list", "change", () => ask(false));
  on("drawn", "change", () => draw(seen.seed));
  on("drawn-n", "change", () => draw(seen.seed));
  on("draw", "click", () => draw(seen.seed + 1));
  on("copy-link", "click", copyLink);
  on("codes", "toggle", () => byId("codes").open && fillCodes());
  addEventListener("hashchange", () => location.hash.slice(1) !== linkWords() && takeLink());
  listenToFiles();
  listenToChart();
  listenToChunks();
  listenToControls();
  addEventListener("resize", () => request("gantt", "memory", "chunks"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

async function start() {
  takeData(null);
  OPTIONS.forEach(addOption);
  byId("drawn").append(...DRAWN.map(d => element("option", {value: d.name}, d.words)), element("option", {value: ""}, "nothing"));
  for (const part of document.querySelectorAll("#charts details.more")) part.open = !narrow.matches;
  engine.module = await compileProgram();
  startWorker();
  listen();
  await Promise.all([fillNames("model", []), fillNames("gpu", ["--model", "qwen2.5-7b"])]);
  await takeLink();
}

// Tests and the console look in here.
window.chunkflow = {seen, state, inputs, setOption, ask, chart, OPTIONS, runCommand, openFiles, chartAsSvg};
start().catch(error => tellProblem("this page cannot run here: " + error.message));
