// schedules.js - the schedules of a report, unpacked when first viewed. Times are in a schedule's ticks until they are
// shown; tools/report/report.c describes the format of the data.

let data, unit, drawable;      // see takeData
const unpacked = new Map();
const state = {
  schedule: -1, beside: -1, colours: "pass", bubbles: "cause", critical: false,
  from: 0, to: 1,                 // the visible part of the time axis
  focus: null,                    // {schedule, stage, i} of the focused pass
  chain: null                     // {plan, chain} or {plan, chunk}: the marked chunks
};

const PASS_NAMES = {F: "forward", R: "replay", B: "backward", I: "input gradient", W: "weight gradient"};
const time = x => count(x) + (unit === "s" ? " s" : "");

// Formats a time. Simulated seconds are estimates, shown in three digits; token times and measured times are exact.
const shown = x => unit === "s" ? estimate(x) : count(x);
const shownTime = x => shown(x) + (unit === "s" ? " s" : " " + unit);

function held(x) {
  if (data.held !== "bytes") return count(x) + " tokens";
  return x >= 1048576 ? gib(x) : count(x) + " bytes";
}

function unpackStage(stage) {
  const n = stage.pass.length;
  const out = {
    n, letter: new Uint8Array(n), kept: new Uint8Array(n), chunk: new Int32Array(n), row: new Int32Array(n),
    start: new Float64Array(n), end: new Float64Array(n), held: new Float64Array(n), after: stage.after,
    pieceStart: [], pieceEnd: [], pieceCause: [], pieceBefore: [], queued: new Map()
  };
  let now = 0, chunk = 0, amount = 0, piece = 0;
  const takePieces = (many, before) => {
    for (let i = 0; i < many; i++, piece += 2) {
      out.pieceCause.push(stage.idle[piece]);
      out.pieceStart.push(now);
      now += stage.idle[piece + 1];
      out.pieceEnd.push(now);
      out.pieceBefore.push(before);
    }
  };
  const gapsBefore = i => stage.gaps.charCodeAt(i) - 48;
  for (let i = 0; i < n; i++) {
    const letter = stage.pass[i], upper = letter.toUpperCase();
    takePieces(gapsBefore(i), i);
    out.letter[i] = LETTERS.indexOf(upper);
    out.kept[i] = letter === upper ? 1 : 0;
    out.chunk[i] = chunk += stage.chunk[i];
    out.row[i] = stage.row ? stage.row[i] : 0;
    out.held[i] = amount += stage.held[i];
    out.start[i] = now;
    out.end[i] = now += stage.ticks[i];
  }
  takePieces(gapsBefore(n), -1);
  for (let i = 0; i < stage.queued.length; i += 2) out.queued.set(stage.queued[i], stage.queued[i + 1]);
  return out;
}

function scheduleAt(index) {
  if (!unpacked.has(index)) {
    const from = data.schedules[index];
    unpacked.set(index, {index, from, tick: from.tick, plan: data.plans[from.plan],
      stages: from.stages.map(unpackStage), find: null});
  }
  return unpacked.get(index);
}

const isDrawn = index => index >= 0 && index < data.schedules.length && Array.isArray(data.schedules[index].stages);

// ---- where a pass runs ----

// Returns whether a row of virtual stages runs backwards, as every second row of a V does.
const isTurned = (s, line) => s.from.placement === "v" && line % 2 === 1;

// Returns the virtual stage of a pass; stageOf returns the stage of a virtual stage.
function virtualOf(s, stage, i) {
  const line = s.stages[stage].row[i], n = s.stages.length;
  return line * n + (isTurned(s, line) ? n - 1 - stage : stage);
}

function stageOf(s, v) {
  const n = s.stages.length, line = Math.floor(v / n), column = v % n;
  return isTurned(s, line) ? n - 1 - column : column;
}

function indexPasses(s) {
  s.find = new Map();
  s.stages.forEach((stage, at) => {
    for (let i = 0; i < stage.n; i++)
      s.find.set(stage.chunk[i] + ":" + virtualOf(s, at, i) + ":" + LETTERS[stage.letter[i]], i);
  });
}

// Finds a pass of a chunk: [stage, number], or null. A backward may be split in two.
function findPass(s, letter, chunk, v) {
  if (v < 0 || v >= s.stages.length * s.from.virtual_stages) return null;
  if (!s.find) indexPasses(s);
  for (const one of letter === "B" || letter === "I" ? ["B", "I"] : [letter]) {
    const i = s.find.get(chunk + ":" + v + ":" + one);
    if (i !== undefined) return [stageOf(s, v), i];
  }
  return null;
}

// ---- the passes that a pass waits for, and those that wait for it ----

const goesForward = letter => letter === "F" || letter === "R";

// Returns the pass whose end or result a pass waited for last.
function waitedFor(s, stage, i) {
  const st = s.stages[stage], how = st.after[i], letter = LETTERS[st.letter[i]], v = virtualOf(s, stage, i);
  if (how === "1") return [stage, i - 1];
  if (how !== "2") return null;
  return findPass(s, letter, st.chunk[i], goesForward(letter) ? v - 1 : v + 1);
}

// Finds the pass on another stage that takes a pass's result, and the ticks at which it leaves and arrives; or null.
function transferOf(s, stage, i) {
  const st = s.stages[stage], letter = LETTERS[st.letter[i]], v = virtualOf(s, stage, i);
  if (letter === "W" || (letter === "R" && s.from.replay !== "pipeline")) return null;
  const taker = findPass(s, letter, st.chunk[i], goesForward(letter) ? v + 1 : v - 1);
  if (!taker || taker[0] === stage) return null;
  const seconds = s.from.latency + s.from.seconds_per_token * chunkOf(s, st.chunk[i]).rows;
  const left = st.end[i] + (st.queued.get(i) || 0);
  return {taker, left, arrived: left + seconds / s.tick};
}

// ---- chunks ----

function chunkOf(s, chunk) {
  const i = chunk - s.plan.first_chunk, of = s.plan.chunks;
  return {i, chain: of.chain[i], index: of.index[i], prefix: of.prefix[i], tokens: of.tokens[i], padded: of.rows[i],
    slices: of.n_slices[i]};
}

const chainOf = (s, chunk) => s.plan.chunks.chain[chunk - s.plan.first_chunk];
// Returns the chain that gives a chunk its hue: in a tree, the root's.
const hueOf = (s, chunk) => (s.plan.chunks.tree || s.plan.chunks.chain)[chunk - s.plan.first_chunk];

function firstSlices(plan) {
  if (!plan.firstSlice) {
    let at = 0;
    plan.firstSlice = plan.chunks.n_slices.map(n => (at += n) - n);
  }
  return plan.firstSlice;
}

function slicesOf(plan, i) {
  const of = plan.chunks, out = [];
  if (!of.slices) return out;
  for (let j = 0, at = firstSlices(plan)[i] * 3; j < of.n_slices[i]; j++, at += 3)
    out.push({sequence: of.slices[at], begin: of.slices[at + 1], length: of.slices[at + 2]});
  return out;
}

// ---- what is looked at ----

// Returns the schedules that are drawn, one above another.
const panels = () => [state.beside, state.schedule].filter((s, i, all) => isDrawn(s) && all.indexOf(s) === i);

// The makespan of the longest schedule shown, which is the time axis of all.
const span = () => Math.max(0, ...panels().map(i => data.schedules[i].makespan)) || 1;

// Takes the numbers of a report; the view stays. A page takes them once, the playground after each change of a setting.
// A page without a report has an empty one, which is never drawn.
function takeData(fresh) {
  data = fresh || {schedules: [], plans: [], causes: [], best: -1, measured: -1, unit: "s"};
  unit = data.unit === "s" ? "s" : "token times";
  unpacked.clear();
  drawable = data.schedules.map((_, i) => i).filter(isDrawn);
  state.schedule = isDrawn(data.best) ? data.best : drawable.length ? drawable[0] : -1;
  state.beside = -1;
  state.focus = state.chain = null;
  if (isDrawn(data.measured)) {
    state.schedule = data.measured;
    state.beside = data.predicted;
  }
  state.from = 0;
  state.to = span();
}

// Returns the index of the first item of a sorted array above x.
function firstAbove(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ---- a pass, a gap or a chunk in words ----

function kindOf(of, i) {
  if (of.n_slices[i] === 0) return "idle";
  if (of.chain[i] < 0) return "standalone";
  return of.n_slices[i] > 1 ? "hybrid" : "dependent";
}

const sliceWords = s => `${s.sequence} [${count(s.begin)}, ${count(s.begin + s.length)})`;

function chunkWords(plan, i) {
  const of = plan.chunks, slices = slicesOf(plan, i), most = 4;
  let text = `${kindOf(of, i)}, ${count(of.tokens[i])} tokens`;
  if (of.rows[i] !== of.tokens[i]) text += ` (${count(of.rows[i])} with padding)`;
  if (of.chain[i] >= 0)
    text += `; chain ${of.chain[i]}, part ${of.index[i] + 1}, after ${count(of.prefix[i])} tokens (prefix)`;
  if (slices.length) text += "; slices " + slices.slice(0, most).map(sliceWords).join(", ");
  else if (of.n_slices[i]) text += `; ${count(of.n_slices[i])} slices`;
  if (slices.length > most) text += ` and ${count(slices.length - most)} more`;
  return text;
}

const passName = (st, i) => LETTERS[st.letter[i]] + st.chunk[i];

function passWords(s, stage, i) {
  const st = s.stages[stage], letter = LETTERS[st.letter[i]], chunk = st.chunk[i], bound = waitedFor(s, stage, i);
  let text = `${passName(st, i)}: ${PASS_NAMES[letter]} of chunk ${chunk} on stage ${stage}`;
  if (s.from.virtual_stages > 1) text += `, virtual stage ${virtualOf(s, stage, i)}`;
  if (goesForward(letter)) text += st.kept[i] ? ", keeps its activations" : ", drops its activations";
  text += `\n${time(st.start[i] * s.tick)} to ${time(st.end[i] * s.tick)}, `
    + `${time((st.end[i] - st.start[i]) * s.tick)}; the stage holds ${held(st.held[i] * share(s))}`;
  text += "\n" + chunkWords(s.plan, chunk - s.plan.first_chunk);
  if (bound)
    text += `\nstarted after ${passName(s.stages[bound[0]], bound[1])} on `
      + (bound[0] === stage ? "this stage" : "stage " + bound[0]);
  return text;
}

const CAUSES = {
  "warm-up": "the stage has run nothing yet",
  "drain": "the stage has run everything",
  "overhead": "its next pass could run and has not begun",
  "order": "a later pass could run: the schedule puts it behind one that waits",
  "memory": "a pass could run if the stage, or K, left room for its activations",
  "transfer": "a pass could run if transfers took no time",
  "state": "a pass could run if it did not need K and V, or their gradients, from its chain",
  "imbalance": "the pass that the next one waits for runs longer than the mean of its kind",
  "gradient": "the next pass is a backward, whose gradient is not there",
  "activation": "the next pass is a forward or replay, whose input is not there"
};

function gapWords(s, stage, piece) {
  const st = s.stages[stage], before = st.pieceBefore[piece], cause = data.causes[st.pieceCause[piece]];
  const text = `idle: ${cause}, ${time((st.pieceEnd[piece] - st.pieceStart[piece]) * s.tick)}\n${CAUSES[cause]}`;
  return before >= 0 ? text + "\nnext is " + passName(st, before) : text;
}

// Converts virtual stages' copies into whole stages, in which everything is shown.
const share = s => s.from.held_unit / (data.held === "tokens" || !s.from.memory ? s.from.virtual_stages : 1);
