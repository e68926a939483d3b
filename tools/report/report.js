// report.js - draws a report from the JSON in the page. All text from outside goes through textContent, never through
// markup. Times are counted in ticks of a schedule until they are shown; see tools/report.c for the form of the data.
"use strict";
(function () {

const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const LETTERS = "FRBIW";
const PASS_NAMES = {F: "forward", R: "replay", B: "backward", I: "input gradient", W: "weight gradient"};

// ---- words ----

function element(tag, options, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (key === "class") made.className = value;
    else if (key === "style") for (const [name, text] of Object.entries(value)) made.style.setProperty(name, text);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null).map(child => child instanceof Node ? child
    : String(child)));
  return made;
}

const isWhole = x => Math.abs(x) < 9e15 && x === Math.trunc(x);
const inWhole = new Intl.NumberFormat("en-US"), inSix = new Intl.NumberFormat("en-US", {maximumSignificantDigits: 6});
const count = x => isWhole(x) ? inWhole.format(x) : number(x);

function number(x) {
  if (!Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return x.toPrecision(6);
  return inSix.format(x);
}

const unit = data.unit === "s" ? "s" : "token times";
const time = x => count(x) + (unit === "s" ? " s" : "");
const percent = x => (100 * x).toFixed(2) + " %";
const gib = x => (x / 1073741824).toFixed(2) + " GiB";
const held = x => data.held === "bytes" ? x >= 1048576 ? gib(x) : count(x) + " bytes" : count(x) + " tokens";

// A number as text, with its exact value for whoever reads the page by program.
const exact = (value, text) => element("data", {value: String(value)}, text);

function row(cells, options) {
  return element("tr", options, ...cells.map(cell => cell instanceof HTMLTableCellElement ? cell
    : element("td", {}, cell)));
}

const head = names => element("tr", {}, ...names.map(name => element("th", {scope: "col"}, name)));

// ---- schedules, unpacked when they are first looked at ----

const unpacked = new Map();

function unpackStage(stage) {
  const n = stage.pass.length, out = {n, letter: new Uint8Array(n), kept: new Uint8Array(n), chunk: new Int32Array(n),
    row: new Int32Array(n), start: new Float64Array(n), end: new Float64Array(n), held: new Float64Array(n),
    after: stage.after, pieceStart: [], pieceEnd: [], pieceCause: [], pieceBefore: [], queued: new Map()};
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
  for (let i = 0; i < n; i++) {
    const letter = stage.pass[i], upper = letter.toUpperCase();
    takePieces(stage.gaps.charCodeAt(i) - 48, i);
    out.letter[i] = LETTERS.indexOf(upper);
    out.kept[i] = letter === upper ? 1 : 0;
    out.chunk[i] = chunk += stage.chunk[i];
    out.row[i] = stage.row ? stage.row[i] : 0;
    out.held[i] = amount += stage.held[i];
    out.start[i] = now;
    out.end[i] = now += stage.ticks[i];
  }
  takePieces(stage.gaps.charCodeAt(n) - 48, -1);
  for (let i = 0; i < stage.queued.length; i += 2) out.queued.set(stage.queued[i], stage.queued[i + 1]);
  return out;
}

function scheduleAt(index) {
  if (unpacked.has(index)) return unpacked.get(index);
  const from = data.schedules[index];
  const made = {index, from, tick: from.tick, plan: data.plans[from.plan], stages: from.stages.map(unpackStage),
    find: null};
  unpacked.set(index, made);
  return made;
}

const isDrawn = index => index >= 0 && index < data.schedules.length && Array.isArray(data.schedules[index].stages);

// The virtual stage of a pass, and the stage of a virtual stage.
function virtualOf(s, stage, i) {
  const line = s.stages[stage].row[i], turned = s.from.placement === "v" && line % 2 === 1;
  return line * s.stages.length + (turned ? s.stages.length - 1 - stage : stage);
}

function stageOf(s, v) {
  const n = s.stages.length, line = Math.floor(v / n), column = v % n;
  return s.from.placement === "v" && line % 2 === 1 ? n - 1 - column : column;
}

// Where a pass of a chunk runs: [stage, number], or null.
function findPass(s, letter, chunk, v) {
  if (v < 0 || v >= s.stages.length * s.from.virtual_stages) return null;
  if (!s.find) {
    s.find = new Map();
    s.stages.forEach((stage, at) => {
      for (let i = 0; i < stage.n; i++)
        s.find.set(stage.chunk[i] + ":" + virtualOf(s, at, i) + ":" + LETTERS[stage.letter[i]], i);
    });
  }
  const letters = letter === "B" || letter === "I" ? ["B", "I"] : [letter];
  for (const one of letters) {
    const i = s.find.get(chunk + ":" + v + ":" + one);
    if (i !== undefined) return [stageOf(s, v), i];
  }
  return null;
}

// The pass whose end, or whose result, a pass waited for last.
function waitedFor(s, stage, i) {
  const how = s.stages[stage].after[i], letter = LETTERS[s.stages[stage].letter[i]], v = virtualOf(s, stage, i);
  if (how === "1") return [stage, i - 1];
  if (how !== "2") return null;
  return findPass(s, letter, s.stages[stage].chunk[i], letter === "F" || letter === "R" ? v - 1 : v + 1);
}

// Who takes the result of a pass on another stage, with the ticks at which it leaves and arrives; or null.
function transferOf(s, stage, i) {
  const st = s.stages[stage], letter = LETTERS[st.letter[i]], v = virtualOf(s, stage, i);
  if (letter === "W" || (letter === "R" && s.from.replay !== "pipeline")) return null;
  const to = letter === "F" || letter === "R" ? v + 1 : v - 1, taker = findPass(s, letter, st.chunk[i], to);
  if (!taker || taker[0] === stage) return null;
  const seconds = s.from.latency + s.from.seconds_per_token * chunkOf(s, st.chunk[i]).padded;
  const left = st.end[i] + (st.queued.get(i) || 0);
  return {taker, left, arrived: left + seconds / s.tick};
}

function chunkOf(s, chunk) {
  const plan = s.plan, i = chunk - plan.first_chunk, of = plan.chunks;
  return {i, group: of.group[i], index: of.index[i], prefix: of.prefix[i], tokens: of.tokens[i], padded: of.padded[i],
    slices: of.n_slices[i]};
}

function firstSlices(plan) {
  if (!plan.firstSlice) {
    let at = 0;
    plan.firstSlice = plan.chunks.n_slices.map(n => (at += n) - n);
  }
  return plan.firstSlice;
}

function slicesOf(plan, i) {
  if (!plan.chunks.slices) return [];
  const from = firstSlices(plan)[i] * 3, n = plan.chunks.n_slices[i], out = [];
  for (let j = 0; j < n; j++)
    out.push({sequence: plan.chunks.slices[from + 3 * j], begin: plan.chunks.slices[from + 3 * j + 1],
      length: plan.chunks.slices[from + 3 * j + 2]});
  return out;
}

// ---- what is looked at ----

const drawable = data.schedules.map((_, i) => i).filter(isDrawn);
const longest = Math.max(0, ...drawable.map(i => data.schedules[i].makespan)) || 1;
const state = {
  schedule: isDrawn(data.best) ? data.best : drawable.length ? drawable[0] : -1,
  beside: -1, colours: "pass", bubbles: "blank", critical: false,
  from: 0, to: longest,           // the part of the time axis that is shown
  focus: null,                    // {schedule, stage, i} of the pass at hand
  group: null                     // {plan, group} or {plan, chunk}: what is marked
};
if (isDrawn(data.measured)) {
  state.schedule = data.measured;
  state.beside = data.predicted;
}

const panels = () => [state.beside, state.schedule].filter((s, i, all) => isDrawn(s) && all.indexOf(s) === i);

// ---- colours ----

let colour = {};

function readColours() {
  const style = getComputedStyle(document.documentElement), get = name => style.getPropertyValue("--" + name).trim();
  colour = {page: get("page"), panel: get("panel"), ink: get("ink"), quiet: get("quiet"), line: get("line"),
    lane: get("lane"), accent: get("accent"), mark: get("mark"), shade: get("shade"), limit: get("limit"),
    alone: get("alone"), aloneAlt: get("alone-alt"), groupInk: get("group-ink"), aloneInk: get("alone-ink"),
    pass: [...LETTERS].map(get), passInk: [...LETTERS].map(letter => get(letter + "-ink")),
    group: [0, 1, 2, 3, 4, 5, 6, 7].map(i => get("group" + i)),
    cause: data.causes.map((_, i) => get("cause" + i)), hatch: null};
}

// A colour as a pixel of an ImageData.
const pixels = new Map();
const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});

function pixelOf(text) {
  if (!pixels.has(text)) {
    probe.fillStyle = text;
    probe.fillRect(0, 0, 1, 1);
    pixels.set(text, new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer)[0]);
  }
  return pixels.get(text);
}

const groupColour = group => colour.group[group % colour.group.length];

// ---- canvases ----

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";

// Makes it sharp and empty; returns its context, which is in CSS pixels.
function prepare(canvas, height) {
  const paper = document.documentElement.classList.contains("paper");
  const ratio = Math.max(window.devicePixelRatio || 1, paper ? 2 : 1), width = Math.max(120, canvas.clientWidth
    || canvas.parentNode.clientWidth);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d", {alpha: false});
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.fillStyle = colour.page;
  g.fillRect(0, 0, width, height);
  g.font = FONT;
  g.textBaseline = "middle";
  g.textAlign = "left";
  return {g, width, height};
}

const widths = new Map();

function textWidth(g, text) {
  if (!widths.has(text)) widths.set(text, g.measureText(text).width);
  if (widths.size > 20000) widths.clear();
  return widths.has(text) ? widths.get(text) : g.measureText(text).width;
}

// The first of 1, 2, 5, 10, ... times a power of ten that is not below x.
function roundUp(x) {
  const power = Math.pow(10, Math.floor(Math.log10(x)));
  for (const step of [1, 2, 5, 10]) if (power * step >= x) return power * step;
  return 10 * power;
}

// Marks on the time axis: whole steps, with labels that do not touch.
function drawAxis(g, left, width, y, from, to) {
  if (!(to > from)) return;
  const step = roundUp((to - from) * 92 / width), digits = Math.max(0, Math.min(20, -Math.floor(Math.log10(step))));
  g.fillStyle = colour.quiet;
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    const x = left + (i * step - from) / (to - from) * width;
    const at = i * step, text = step >= 1 && Math.abs(at) < 1e15 ? count(Math.round(at)) : Math.abs(at) < 1e15
      && step >= 1e-6 ? at.toFixed(digits) : at.toPrecision(3);
    const label = text + (i === Math.ceil(from / step) ? " " + unit : ""), w = textWidth(g, label);
    g.fillRect(Math.round(x), y - 9, 1, 4);
    if (x + w <= left + width) g.fillText(label, x, y + 2);
  }
}

const frames = {gantt: false, memory: false, chunks: false};

function request(...names) {
  for (const name of names) {
    if (frames[name]) continue;
    frames[name] = true;
    requestAnimationFrame(() => { frames[name] = false; painters[name](); });
  }
}

// ---- the chart of passes ----

const GUTTER = 62, TITLE = 22, AXIS = 26, GAP = 12;
const chart = {lanes: [], width: 0};

// High enough to read where there are few stages; a browser's canvas has an end where there are very many.
function laneHeight(n) {
  const lanes = n * Math.max(1, panels().length);
  return Math.min(Math.max(7, Math.min(26, Math.floor(560 / lanes))), 16000 / lanes);
}

// The first item of a sorted array that is above x.
function firstAbove(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A canvas to set pixels of, which is then drawn onto another: one picture in place of thousands of boxes.
function makeScratch() {
  const canvas = document.createElement("canvas"), scratch = {canvas, image: null, cells: null};
  scratch.clear = (width, height) => {
    if (!scratch.image || canvas.width !== width || canvas.height !== height) {
      [canvas.width, canvas.height] = [width, height];
      scratch.image = new ImageData(width, height);
      scratch.cells = new Uint32Array(scratch.image.data.buffer);
    } else scratch.cells.fill(0);
  };
  scratch.put = () => { canvas.getContext("2d").putImageData(scratch.image, 0, 0); return canvas; };
  return scratch;
}

const strip = makeScratch(), plot = makeScratch();

// Boxes along a lane from left to right that are below a pixel: a column has the mean of what is in it, so that its
// hue says what there is most of, and a pale one that it is idle for a part.
function columnMerger(colours) {
  const cover = new Float64Array(colours.length), paint = colours.map(pixelOf);
  let column = -1;
  strip.clear(Math.ceil(chart.width) + 1, 1);
  const endColumn = () => {
    let sum = 0, red = 0, green = 0, blue = 0;
    for (let i = 0; i < cover.length; i++) {
      sum += cover[i];
      red += cover[i] * (paint[i] & 255);
      green += cover[i] * (paint[i] >> 8 & 255);
      blue += cover[i] * (paint[i] >> 16 & 255);
    }
    cover.fill(0);
    const opacity = Math.round(255 * Math.min(1, sum));
    if (sum > 0) strip.cells[column] = opacity << 24 | blue / sum << 16 | green / sum << 8 | red / sum;
  };
  return {
    add(x0, x1, which) {
      while (x0 < x1) {
        const at = Math.floor(x0), end = Math.min(x1, at + 1);
        if (at !== column) {
          if (column >= 0) endColumn();
          column = at;
        }
        cover[which] += end - x0;
        x0 = end;
      }
    },
    draw(g, y, h) {
      if (column < 0) return;
      endColumn();
      g.imageSmoothingEnabled = false;
      g.drawImage(strip.put(), 0, 0, strip.canvas.width, 1, 0, y, strip.canvas.width, h);
    }
  };
}

// Which of the colours of a lane a pass has: by kind, or by group with standalone chunks in two greys.
function paletteOf() {
  return state.colours === "pass" ? colour.pass : [...colour.group, colour.alone, colour.aloneAlt];
}

function colourOf(s, st, i) {
  if (state.colours === "pass") return st.letter[i];
  const group = s.plan.chunks.group[st.chunk[i] - s.plan.first_chunk], n = colour.group.length;
  return group >= 0 ? group % n : n + st.chunk[i] % 2;
}

function isMarked(s, st, i) {
  const mark = state.group;
  if (!mark) return true;
  if (mark.plan !== s.from.plan) return false;
  if (mark.group >= 0) return s.plan.chunks.group[st.chunk[i] - s.plan.first_chunk] === mark.group;
  return st.chunk[i] === mark.chunk;
}

function hatch(g) {
  if (colour.hatch) return colour.hatch;
  const tile = document.createElement("canvas"), t = (tile.width = tile.height = 6, tile.getContext("2d"));
  t.strokeStyle = "rgba(0, 30, 90, 0.35)";
  t.beginPath();
  for (const x of [-6, 0, 6]) { t.moveTo(x, 6); t.lineTo(x + 6, 0); }
  t.stroke();
  return colour.hatch = g.createPattern(tile, "repeat");
}

// One pass that is a pixel wide or more.
function drawPass(g, s, st, i, x0, x1, y, h) {
  const w = x1 - x0, letter = LETTERS[st.letter[i]], group = s.plan.chunks.group[st.chunk[i] - s.plan.first_chunk];
  const which = colourOf(s, st, i), byPass = state.colours === "pass";
  g.fillStyle = paletteOf()[which];
  g.fillRect(x0, y, w > 3 ? w - 0.75 : w, h);
  if (w > 5 && letter === "R") { g.fillStyle = hatch(g); g.fillRect(x0, y, w - 0.75, h); }
  if (w > 3 && h > 12 && byPass && group >= 0) { g.fillStyle = groupColour(group); g.fillRect(x0, y, w - 0.75, 3); }
  if (w > 3 && h > 12 && letter <= "R" && letter !== "B" && letter !== "I" && !st.kept[i]) {
    g.fillStyle = colour.lane;
    g.fillRect(x0, y + h - 3, w - 0.75, 1.5);
  }
  if (w < 14 || h < 12) return;
  const text = letter + st.chunk[i];
  if (textWidth(g, text) > w - 4) return;
  g.fillStyle = byPass ? colour.passInk[st.letter[i]] : group >= 0 ? colour.groupInk : colour.aloneInk;
  g.fillText(text, x0 + 3, y + h / 2 + 1);
}

// Idle time by cause: low boxes, so that none is taken for a pass of a group with that hue.
function drawPieces(g, st, y, h, x, from, to) {
  const merger = columnMerger(colour.cause);
  for (let p = firstAbove(st.pieceEnd, from); p < st.pieceEnd.length && st.pieceStart[p] < to; p++)
    merger.add(Math.max(GUTTER, x(st.pieceStart[p])), Math.min(chart.width, x(st.pieceEnd[p])), st.pieceCause[p]);
  merger.draw(g, y, h);
}

function drawLane(g, lane) {
  const {s, st, y, h} = lane, scale = (chart.width - GUTTER) / (state.to - state.from);
  const x = ticks => GUTTER + (ticks * s.tick - state.from) * scale, from = state.from / s.tick,
    to = state.to / s.tick;
  g.fillStyle = colour.lane;
  g.fillRect(GUTTER, y, chart.width - GUTTER, h);
  const low = Math.max(1, Math.round(h / 3));
  if (state.bubbles === "cause") drawPieces(g, st, y + h - low, low, x, from, to);
  const merger = columnMerger(paletteOf());
  for (let i = firstAbove(st.end, from); i < st.n && st.start[i] < to; i++) {
    const x0 = Math.max(GUTTER, x(st.start[i])), x1 = Math.min(chart.width, x(st.end[i]));
    if (x1 - x0 >= 1) drawPass(g, s, st, i, x0, x1, y, h);
    else merger.add(x0, x1, colourOf(s, st, i));
  }
  merger.draw(g, y, h);
  if (state.group) shadeUnmarked(g, s, st, y, h, x, from, to);
}

// Everything but the marked chunks steps back.
function shadeUnmarked(g, s, st, y, h, x, from, to) {
  let at = GUTTER;
  g.fillStyle = colour.shade;
  for (let i = firstAbove(st.end, from); i < st.n && st.start[i] < to; i++) {
    if (!isMarked(s, st, i)) continue;
    const x0 = Math.max(GUTTER, x(st.start[i])), x1 = Math.max(x(st.end[i]), x0 + 1);
    if (x0 > at) g.fillRect(at, y, x0 - at, h);
    at = Math.max(at, x1);
  }
  if (at < chart.width) g.fillRect(at, y, chart.width - at, h);
}

// How many passes of a schedule are in sight.
function inSight(s) {
  return s.stages.reduce((n, st) => n + firstAbove(st.start, state.to / s.tick) - firstAbove(st.end,
    state.from / s.tick), 0);
}

function laneOf(s, stage) { return chart.lanes.find(lane => lane.s === s && lane.stage === stage); }

function line(g, s, from, fromTicks, to, toTicks) {
  const scale = (chart.width - GUTTER) / (state.to - state.from), x = t => GUTTER + (t * s.tick - state.from) * scale;
  const a = laneOf(s, from), b = laneOf(s, to), down = b.y > a.y;
  g.moveTo(x(fromTicks), down ? a.y + a.h : a.y);
  g.lineTo(x(toTicks), down ? b.y : b.y + b.h);
}

function drawTransfers(g, s) {
  if (!(s.from.latency > 0 || s.from.seconds_per_token > 0) || inSight(s) > 1500) return;
  g.strokeStyle = colour.quiet;
  g.lineWidth = 1;
  g.beginPath();
  s.stages.forEach((st, stage) => {
    for (let i = firstAbove(st.end, (state.from - (state.to - state.from)) / s.tick); i < st.n
         && st.start[i] * s.tick < state.to; i++) {
      const transfer = transferOf(s, stage, i);
      if (transfer) line(g, s, stage, transfer.left, transfer.taker[0], transfer.arrived);
    }
  });
  g.stroke();
}

function drawCritical(g, s) {
  const scale = (chart.width - GUTTER) / (state.to - state.from), x = t => GUTTER + (t * s.tick - state.from) * scale;
  g.strokeStyle = colour.mark;
  g.lineWidth = 2;
  g.beginPath();
  for (let p = 0; p < s.from.path.length; p += 2) {
    const stage = s.from.path[p], i = s.from.path[p + 1], st = s.stages[stage], lane = laneOf(s, stage);
    if (p >= 2 && s.from.path[p - 2] !== stage) {
      const before = s.from.path[p - 2];
      line(g, s, before, s.stages[before].end[s.from.path[p - 1]], stage, st.start[i]);
    }
    if (x(st.end[i]) < GUTTER || x(st.start[i]) > chart.width) continue;
    g.moveTo(x(st.start[i]), lane.y + lane.h - 1);
    g.lineTo(x(st.end[i]), lane.y + lane.h - 1);
  }
  g.stroke();
}

function drawFocus(g) {
  const f = state.focus;
  if (!f) return;
  const s = scheduleAt(f.schedule), lane = laneOf(s, f.stage);
  if (!lane) return;
  const scale = (chart.width - GUTTER) / (state.to - state.from), x = t => GUTTER + (t * s.tick - state.from) * scale;
  const st = s.stages[f.stage], x0 = x(st.start[f.i]), w = Math.max(2, x(st.end[f.i]) - x0);
  const bound = waitedFor(s, f.stage, f.i);
  g.strokeStyle = colour.mark;
  g.lineWidth = 2;
  g.strokeRect(x0, lane.y, w, lane.h);
  if (!bound || bound[0] === f.stage) return;
  g.setLineDash([4, 3]);
  g.beginPath();
  line(g, s, bound[0], s.stages[bound[0]].end[bound[1]], f.stage, st.start[f.i]);
  g.stroke();
  g.setLineDash([]);
}

function layOut() {
  let y = 0;
  chart.lanes = [];
  chart.titles = [];
  for (const index of panels()) {
    const s = scheduleAt(index), h = laneHeight(s.stages.length);
    chart.titles.push({s, y});
    y += TITLE;
    s.stages.forEach((st, stage) => {
      chart.lanes.push({s, st, stage, y, h: h > 9 ? h - 2 : h > 2 ? h - 1 : h});
      y += h;
    });
    y += GAP;
  }
  return y + AXIS - GAP + 6;
}

function drawLabels(g, height) {
  g.fillStyle = colour.page;
  g.fillRect(0, 0, GUTTER, height);
  for (const title of chart.titles) {
    const from = title.s.from;
    g.fillStyle = colour.ink;
    g.fillText(from.name + ", " + time(from.makespan) + (unit === "s" ? "" : " " + unit) + ", idle "
      + percent(from.bubble_useful), 0, title.y + TITLE / 2);
  }
  let last = -99;
  for (const lane of chart.lanes) {
    if (lane.y - last < 12 && lane.stage > 0) continue;
    last = lane.y;
    g.fillStyle = colour.quiet;
    g.fillText("stage " + lane.stage, 0, lane.y + lane.h / 2 + 1);
  }
}

function drawGantt() {
  const canvas = byId("gantt"), height = layOut(), {g, width} = prepare(canvas, height);
  chart.width = width;
  for (const lane of chart.lanes) drawLane(g, lane);
  g.save();
  g.beginPath();
  g.rect(GUTTER, 0, width - GUTTER, height);
  g.clip();
  for (const index of panels()) {
    drawTransfers(g, scheduleAt(index));
    if (state.critical) drawCritical(g, scheduleAt(index));
  }
  drawFocus(g);
  g.restore();
  drawLabels(g, height);
  drawAxis(g, GUTTER, width - GUTTER, height - 10, state.from, state.to);
}

// ---- memory over time ----

const MEMORY_HEIGHT = 220, MEMORY_TOP = 14;

function limitOf(s) {
  const from = s.from;
  if (data.held === "bytes" && from.memory && data.gpu_memory) return {all: data.gpu_memory, name: data.gpu + " has "
    + gib(data.gpu_memory)};
  if (data.held === "bytes") return data.limit_bytes ? {all: data.limit_bytes, name: held(data.limit_bytes)} : null;
  if (!from.limits) return null;
  const most = Math.max(...from.limits) * data.chunk_size / from.virtual_stages;
  return {all: most, name: number(Math.max(...from.limits) / from.virtual_stages)
    + " chunks on the stage that has most, if all are full: " + held(most)};
}

function stageColour(stage, n) {
  const t = n > 1 ? stage / (n - 1) : 0.5;
  return `hsl(${Math.round(262 - 212 * t)} 62% ${document.documentElement.classList.contains("paper")
    || !matchMedia("(prefers-color-scheme: dark)").matches ? 42 : 62}%)`;
}

// What is held by virtual copies is shown in whole stages' worth, as everywhere.
const share = s => s.from.held_unit / (data.held === "tokens" || !s.from.memory ? s.from.virtual_stages : 1);

// A stage's line: in each column of pixels from the least to the most that is held in it.
function drawHeld(s, stage, y, ratio) {
  const st = s.stages[stage], width = plot.canvas.width, scale = (width - GUTTER * ratio) / (state.to - state.from);
  const x = t => GUTTER * ratio + (t * s.tick - state.from) * scale, paint = pixelOf(stageColour(stage,
    s.stages.length));
  const thick = Math.round(1.5 * ratio), first = Math.max(0, firstAbove(st.end, state.from / s.tick) - 1);
  let column = Math.ceil(GUTTER * ratio), low = st.held[first], high = low, last = low;
  const fill = () => {
    const top = Math.round(y(high * share(s)) * ratio), bottom = Math.round(y(low * share(s)) * ratio) + thick;
    for (let at = top * width + column; at < bottom * width; at += width) plot.cells[at] = paint;
  };
  const goTo = end => {
    for (; column < end; column++) {
      fill();
      low = high = last;
    }
  };
  for (let i = first; i < st.n && st.start[i] * s.tick < state.to; i++) {
    if (i === 0) column = Math.max(column, Math.floor(x(st.start[0])));
    goTo(Math.min(width, Math.floor(x(st.start[i]))));
    last = st.held[i];
    if (last < low) low = last;
    if (last > high) high = last;
  }
  if (st.n) goTo(Math.min(width, Math.ceil(x(st.end[st.n - 1]))));
}

function peakOf(s) {
  let most = 0;
  for (const st of s.stages) for (let i = 0; i < st.n; i++) if (st.held[i] > most) most = st.held[i];
  return most * share(s);
}

function drawMemory() {
  const canvas = byId("memory"), {g, width} = prepare(canvas, MEMORY_HEIGHT);
  if (!isDrawn(state.schedule)) return;
  const s = scheduleAt(state.schedule), limit = limitOf(s), peak = s.peak || (s.peak = peakOf(s) || 1);
  const shown = limit && limit.all <= 3 * peak ? limit : null, top = 1.06 * (shown ? Math.max(peak, limit.all)
    : peak);
  const bottom = MEMORY_HEIGHT - AXIS, y = value => bottom - value / top * (bottom - MEMORY_TOP);
  const step = data.held === "bytes" ? memoryStep(top) : roundUp(top / 5);
  for (let value = 0; value <= top; value += step) {
    g.fillStyle = colour.line;
    g.fillRect(GUTTER, Math.round(y(value)), width - GUTTER, 1);
    g.fillStyle = colour.quiet;
    g.fillText(data.held === "bytes" ? number(value / memoryUnit(top).size) + " " + memoryUnit(top).name
      : count(value), 0, y(value));
  }
  plot.clear(canvas.width, canvas.height);
  s.stages.forEach((_, stage) => drawHeld(s, stage, y, canvas.width / width));
  g.drawImage(plot.put(), 0, 0, width, MEMORY_HEIGHT);
  if (shown) {
    g.strokeStyle = g.fillStyle = colour.limit;
    g.setLineDash([6, 4]);
    g.beginPath();
    g.moveTo(GUTTER, y(limit.all));
    g.lineTo(width, y(limit.all));
    g.stroke();
    g.setLineDash([]);
    g.fillText(limit.name, width - textWidth(g, limit.name) - 2, y(limit.all) - 8);
  }
  drawAxis(g, GUTTER, width - GUTTER, MEMORY_HEIGHT - 10, state.from, state.to);
}

function memoryUnit(x) {
  const names = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0, size = 1;
  while (i < 4 && x >= 2 * 1024 * size) { size *= 1024; i++; }
  return {name: names[i], size};
}

const memoryStep = top => roundUp(top / 5 / memoryUnit(top).size) * memoryUnit(top).size;

// ---- chunks as bars of slices ----

const CHUNKS_HEIGHT = 190;
const bars = {n: 0, left: 38, width: 0};

function drawChunks() {
  const canvas = byId("chunks"), {g, width} = prepare(canvas, CHUNKS_HEIGHT), plan = data.plans[0], of = plan.chunks;
  const n = of.group.length, bottom = CHUNKS_HEIGHT - AXIS, top = 8, size = plan.chunk_size,
    w = (width - bars.left) / Math.max(1, n);
  const y = tokens => bottom - tokens / size * (bottom - top);
  bars.n = n;
  bars.width = width;
  g.fillStyle = colour.lane;
  g.fillRect(bars.left, top, width - bars.left, bottom - top);
  if (w >= 3) for (let i = 0; i < n; i++) drawBar(g, plan, i, bars.left + i * w, w > 5 ? w - 1.5 : w - 0.5, y);
  else drawBarColumns(g, of, width, w, y, bottom);
  g.fillStyle = colour.quiet;
  g.fillText(count(size), 0, top + 4);
  g.fillText("0", 0, bottom - 4);
  g.fillText("chunk " + plan.first_chunk, bars.left, CHUNKS_HEIGHT - 12);
  const last = String(plan.first_chunk + n - 1);
  g.fillText(last, width - textWidth(g, last), CHUNKS_HEIGHT - 12);
}

function drawBar(g, plan, i, x, w, y) {
  const of = plan.chunks, group = of.group[i], align = plan.align;
  let at = 0;
  if (state.group && state.group.plan === 0)
    g.globalAlpha = (state.group.group >= 0 ? group === state.group.group
      : state.group.chunk === i + plan.first_chunk) ? 1 : 0.25;
  if (!of.slices) {
    g.fillStyle = group >= 0 ? groupColour(group) : colour.alone;
    g.fillRect(x, y(of.tokens[i]), w, y(0) - y(of.tokens[i]));
  }
  slicesOf(plan, i).forEach((slice, j) => {
    const height = y(at) - y(at + slice.length);
    g.fillStyle = group >= 0 && j === 0 ? groupColour(group) : j % 2 ? colour.aloneAlt : colour.alone;
    g.fillRect(x, y(at + slice.length), w, height > 3 ? height - 0.75 : height);
    at += Math.ceil(slice.length / align) * align;
  });
  g.globalAlpha = 1;
}

// Less than three pixels a chunk: in each column how full its chunks are, and how much of that is dependent.
function drawBarColumns(g, of, width, w, y, bottom) {
  for (let x = bars.left; x < width; x++) {
    const from = Math.floor((x - bars.left) / w), to = Math.min(of.group.length,
      Math.max(from + 1, Math.floor((x + 1 - bars.left) / w)));
    let tokens = 0, dependent = 0;
    for (let i = from; i < to; i++) {
      tokens += of.tokens[i];
      if (of.group[i] >= 0) dependent += of.tokens[i];
    }
    if (to <= from) continue;
    g.fillStyle = colour.alone;
    g.fillRect(x, y(tokens / (to - from)), 1, bottom - y(tokens / (to - from)));
    g.fillStyle = colour.group[0];
    g.fillRect(x, y(dependent / (to - from)), 1, bottom - y(dependent / (to - from)));
  }
}

const painters = {gantt: drawGantt, memory: drawMemory, chunks: drawChunks};

// ---- a pass or a gap in words ----

function chunkWords(plan, i) {
  const of = plan.chunks, group = of.group[i], slices = slicesOf(plan, i), shown = slices.slice(0, 4);
  const kind = of.n_slices[i] === 0 ? "idle" : group < 0 ? "standalone" : of.n_slices[i] > 1 ? "hybrid" : "dependent";
  let text = kind + ", " + count(of.tokens[i]) + " tokens";
  if (of.padded[i] !== of.tokens[i]) text += " (" + count(of.padded[i]) + " with padding)";
  if (group >= 0) text += "; group " + group + ", part " + (of.index[i] + 1) + ", after " + count(of.prefix[i])
    + " tokens (prefix)";
  if (shown.length)
    text += "; slices " + shown.map(s => s.sequence + " [" + count(s.begin) + ", " + count(s.begin + s.length)
      + ")").join(", ")
      + (slices.length > 4 ? " and " + count(slices.length - 4) + " more" : "");
  else if (of.n_slices[i]) text += "; " + count(of.n_slices[i]) + " slices";
  return text;
}

function passWords(s, stage, i) {
  const st = s.stages[stage], letter = LETTERS[st.letter[i]], bound = waitedFor(s, stage, i);
  const v = s.from.virtual_stages > 1 ? ", virtual stage " + virtualOf(s, stage, i) : "";
  const kept = letter === "F" || letter === "R" ? st.kept[i] ? ", keeps its activations" : ", drops its activations"
    : "";
  let text = letter + st.chunk[i] + ": " + PASS_NAMES[letter] + " of chunk " + st.chunk[i] + " on stage " + stage + v
    + kept + "\n"
    + time(st.start[i] * s.tick) + " to " + time(st.end[i] * s.tick) + ", " + time((st.end[i] - st.start[i]) * s.tick)
    + "; the stage holds " + held(st.held[i] * share(s)) + "\n" + chunkWords(s.plan,
      st.chunk[i] - s.plan.first_chunk);
  if (bound) text += "\nstarted after " + LETTERS[s.stages[bound[0]].letter[bound[1]]]
    + s.stages[bound[0]].chunk[bound[1]]
    + (bound[0] === stage ? " on this stage" : " on stage " + bound[0]);
  return text;
}

function gapWords(s, stage, piece) {
  const st = s.stages[stage], before = st.pieceBefore[piece];
  return "idle: " + data.causes[st.pieceCause[piece]] + ", "
    + time((st.pieceEnd[piece] - st.pieceStart[piece]) * s.tick) + "\n"
    + CAUSES[data.causes[st.pieceCause[piece]]]
    + (before >= 0 ? "\nnext is " + LETTERS[st.letter[before]] + st.chunk[before] : "");
}

const CAUSES = {
  "warm-up": "the stage has run nothing yet",
  "drain": "the stage has run everything",
  "overhead": "its next pass could run and has not begun",
  "order": "a later pass could run: the schedule puts it behind one that waits",
  "memory": "a pass could run if the stage, or K, left room for its activations",
  "transfer": "a pass could run if transfers took no time",
  "state": "a pass could run if it did not need K and V, or their gradients, from its group",
  "imbalance": "the pass that the next one waits for runs longer than the mean of its kind",
  "gradient": "the next pass is a backward, whose gradient is not there",
  "activation": "the next pass is a forward or replay, whose input is not there"
};

// ---- pointing ----

function showTip(text, event) {
  const tip = byId("tip");
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 10)
    : event.clientY + 18) + "px";
}

// What lies at a point of the chart: {schedule, stage, i}, or {schedule, stage, piece}, or null.
function at(x, y) {
  const lane = chart.lanes.find(l => y >= l.y && y < l.y + l.h + 2);
  if (!lane || x < GUTTER) return null;
  const {s, st, stage} = lane,
    ticks = (state.from + (x - GUTTER) / (chart.width - GUTTER) * (state.to - state.from)) / s.tick;
  const i = firstAbove(st.end, ticks), found = {schedule: s.index, stage};
  if (i < st.n && st.start[i] <= ticks) return {...found, i};
  const piece = firstAbove(st.pieceEnd, ticks);
  return piece < st.pieceEnd.length && st.pieceStart[piece] <= ticks ? {...found, piece} : null;
}

function words(found) {
  if (!found) return "";
  const s = scheduleAt(found.schedule);
  return found.i !== undefined ? passWords(s, found.stage, found.i) : gapWords(s, found.stage, found.piece);
}

function focusOn(found, follow) {
  state.focus = found && found.i !== undefined ? found : null;
  byId("details").textContent = words(found) || "Point at a pass, or use the arrow keys.";
  if (state.focus && follow) {
    const s = scheduleAt(found.schedule), st = s.stages[found.stage], half = (state.to - state.from) / 2;
    const start = st.start[found.i] * s.tick, end = st.end[found.i] * s.tick;
    if (start < state.from || end > state.to) show((start + end) / 2 - half, (start + end) / 2 + half);
  }
  request("gantt");
}

function mark(found) {
  if (!found || found.i === undefined) state.group = null;
  else {
    const s = scheduleAt(found.schedule), chunk = s.stages[found.stage].chunk[found.i];
    const group = s.plan.chunks.group[chunk - s.plan.first_chunk], next = {plan: s.from.plan, group, chunk};
    const before = state.group && state.group.plan === next.plan ? state.group : null;
    const same = before && (group >= 0 ? before.group === group : before.chunk === chunk);
    state.group = same ? null : next;
  }
  request("gantt", "chunks");
}

// ---- moving ----

function show(from, to) {
  const least = longest * 1e-7, width = Math.max(least, Math.min(longest, to - from));
  state.from = Math.max(0, Math.min(from, longest - width));
  state.to = state.from + width;
  request("gantt", "memory");
}

function zoom(factor, where) {
  const width = (state.to - state.from) / factor, share = (where - state.from) / (state.to - state.from);
  show(where - share * width, where + (1 - share) * width);
}

const pan = part => show(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));
const middle = () => (state.from + state.to) / 2;
const timeAt = x => state.from + (x - GUTTER) / (chart.width - GUTTER) * (state.to - state.from);

function choose(index) {
  if (!isDrawn(index)) return;
  state.schedule = index;
  state.focus = null;
  if (state.group && data.schedules[index].plan !== state.group.plan) state.group = null;
  for (const input of document.querySelectorAll("#schedules input")) input.checked = Number(input.value) === index;
  focusOn(null);
  request("gantt", "memory", "chunks");
  fillLegends();
  fillTerms();
  fillIdle();
}

function step(by) {
  const i = drawable.indexOf(state.schedule);
  choose(drawable[(i + by + drawable.length) % drawable.length]);
}

function walk(dx, dy) {
  if (state.schedule < 0) return;
  const s = scheduleAt(state.focus ? state.focus.schedule : state.schedule), n = s.stages.length;
  if (!state.focus) return focusOn({schedule: s.index, stage: 0, i: 0}, true);
  let {stage, i} = state.focus;
  const from = s.stages[stage];
  if (dx) i = Math.max(0, Math.min(from.n - 1, i + dx));
  else if (stage + dy >= 0 && stage + dy < n) {
    const ticks = (from.start[i] + from.end[i]) / 2;
    stage += dy;
    i = Math.min(s.stages[stage].n - 1, firstAbove(s.stages[stage].end, ticks));
  }
  focusOn({schedule: s.index, stage, i}, true);
}

const keys = {
  ArrowLeft: () => walk(-1, 0), ArrowRight: () => walk(1, 0), ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1),
  Enter: () => mark(state.focus), " ": () => mark(state.focus),
  Escape: () => { state.group = null; focusOn(null); request("chunks"); },
  "+": () => zoom(1.6, middle()), "=": () => zoom(1.6, middle()), "-": () => zoom(1 / 1.6, middle()),
  "0": () => show(0, longest), PageUp: () => pan(-0.5), PageDown: () => pan(0.5),
  Home: () => show(0, state.to - state.from), End: () => show(longest - (state.to - state.from), longest),
  "[": () => step(-1), "]": () => step(1),
  c: () => { byId("critical").checked = state.critical = !state.critical; request("gantt"); }
};

function listenToChart() {
  const canvas = byId("gantt");
  let grip = null;
  canvas.addEventListener("pointermove", event => {
    if (grip) {
      const moved = (event.offsetX - grip.x) / (chart.width - GUTTER) * (grip.to - grip.from);
      grip.moved = grip.moved || Math.abs(event.offsetX - grip.x) > 3;
      if (grip.moved) { canvas.classList.add("moving"); showTip(""); show(grip.from - moved, grip.to - moved); }
      return;
    }
    showTip(words(at(event.offsetX, event.offsetY)), event);
  });
  canvas.addEventListener("pointerleave", event => showTip("", event));
  canvas.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    grip = {x: event.offsetX, from: state.from, to: state.to, moved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", event => {
    const clicked = grip && !grip.moved;
    grip = null;
    canvas.classList.remove("moving");
    if (!clicked) return;
    const found = at(event.offsetX, event.offsetY);
    focusOn(found);
    mark(found);
  });
  canvas.addEventListener("pointercancel", () => { grip = null; canvas.classList.remove("moving"); });
  canvas.addEventListener("dblclick", event => zoom(2.5, timeAt(event.offsetX)));
  canvas.addEventListener("wheel", event => {
    const across = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey || event.altKey) zoom(Math.pow(1.0025, -event.deltaY), timeAt(event.offsetX));
    else if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) pan(across / (chart.width - GUTTER));
    else return;
    event.preventDefault();
  }, {passive: false});
  canvas.addEventListener("keydown", event => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    action();
    event.preventDefault();
  });
  canvas.addEventListener("focus", () => { if (!state.focus && canvas.matches(":focus-visible")) walk(0, 0); });
}

function listenToChunks() {
  const canvas = byId("chunks"), plan = data.plans[0];
  let chosen = -1;
  const chunkAt = x => {
    const i = Math.floor((x - bars.left) / (bars.width - bars.left) * bars.n);
    return x >= bars.left && i >= 0 && i < bars.n ? i : -1;
  };
  const say = i => "chunk " + (plan.first_chunk + i) + ": " + chunkWords(plan, i);
  const markChunk = i => {
    state.group = {plan: 0, group: plan.chunks.group[i], chunk: plan.first_chunk + i};
    request("gantt", "chunks");
  };
  canvas.addEventListener("pointermove", event => {
    const i = chunkAt(event.offsetX);
    showTip(i >= 0 ? say(i) : "", event);
  });
  canvas.addEventListener("pointerleave", event => showTip("", event));
  canvas.addEventListener("click", event => {
    const i = chunkAt(event.offsetX);
    if (i >= 0) markChunk(chosen = i);
  });
  canvas.addEventListener("keydown", event => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") chosen += event.key === "ArrowRight" ? 1 : -1;
    else if (event.key === "Escape") { state.group = null; request("gantt", "chunks"); return; }
    else return;
    chosen = Math.max(0, Math.min(bars.n - 1, chosen));
    byId("details").textContent = say(chosen);
    markChunk(chosen);
    event.preventDefault();
  });
}

function listenToControls() {
  const redraw = key => event => {
    state[key] = event.target.value;
    request("gantt");
    fillLegends();
  };
  byId("colours").addEventListener("change", redraw("colours"));
  byId("bubbles").addEventListener("change", redraw("bubbles"));
  byId("critical").addEventListener("change", event => { state.critical = event.target.checked; request("gantt"); });
  byId("beside").addEventListener("change", event => {
    state.beside = Number(event.target.value);
    request("gantt");
  });
  byId("schedules").addEventListener("change", event => choose(Number(event.target.value)));
  byId("zoom-in").addEventListener("click", () => zoom(1.6, middle()));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.6, middle()));
  byId("zoom-fit").addEventListener("click", () => show(0, longest));
}

function redrawAll() {
  readColours();
  fillLegends();
  fillTerms();
  fillIdle();
  for (const name of Object.keys(painters)) painters[name]();
}

function listenToWindow() {
  addEventListener("resize", () => request("gantt", "memory", "chunks"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  const paper = on => () => { document.documentElement.classList.toggle("paper", on); redrawAll(); };
  addEventListener("beforeprint", paper(true));
  addEventListener("afterprint", paper(false));
}

// ---- the parts that are text ----

function fillHeader() {
  const words = [count(data.n_sequences) + " sequences", count(data.n_tokens) + " tokens",
    "the longest " + count(data.longest_sequence), "ChunkSize " + count(data.chunk_size), "K " + count(data.k),
    count(data.n_stages) + (data.n_stages === 1 ? " stage" : " stages")];
  if (data.model) words.unshift(data.model + (data.gpu ? " on " + data.gpu : "") + ", tensor parallel "
    + data.tensor_parallel);
  if (data.n_ranks > 1) words.push("rank " + data.rank + " of " + count(data.n_ranks));
  words.unshift(data.source);
  byId("sentence").textContent = data.sentence;
  byId("setting").textContent = words.join(" \u00b7 ");
  byId("advice").append(...data.advice.map(text => element("li", {}, text)));
}

function fillNumbers() {
  const base = data.baseline >= 0 ? data.schedules[data.baseline].makespan : 0,
    memory = data.schedules.some(s => s.memory);
  const names = ["schedule", unit === "s" ? "seconds" : unit, "x as fast", "idle, replays too", "idle", "replays",
    "kept chunks"];
  byId("numbers").append(head(memory ? [...names, "recompute", "fullest GPU"] : names));
  data.schedules.forEach((s, i) => {
    const ratio = base > 0 && s.makespan > 0 ? base / s.makespan : NaN,
      kept = Math.max(0, ...s.peak_live) / s.virtual_stages;
    const replays = s.busy > 0 ? s.replayed / s.busy : 0;
    const cells = [s.name, exact(s.makespan, count(s.makespan)), Number.isFinite(ratio)
      ? exact(ratio, ratio.toFixed(3)) : "-",
      exact(s.bubble_useful, percent(s.bubble_useful)), exact(s.bubble_busy, percent(s.bubble_busy)),
      exact(replays, percent(replays)), exact(kept, count(kept))];
    if (memory) cells.push(s.memory ? s.recompute : "-",
      s.memory ? exact(s.memory[s.fullest].total, gib(s.memory[s.fullest].total) + (s.fits ? "" : ", too much"))
        : "-");
    byId("numbers").append(row(cells, i === data.best ? {class: "chosen"} : {}));
  });
}

function svg(tag, options, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function shortCount(x) {
  if (x >= 1 << 30) return x / (1 << 30) + "G";
  if (x >= 1 << 20) return x / (1 << 20) + "M";
  return x >= 1024 ? x / 1024 + "K" : String(x);
}

function fillLengths() {
  const n = data.lengths.sequences, tokens = data.lengths.tokens;
  let first = n.findIndex(x => x > 0), last = n.length - 1;
  while (last > 0 && n[last] === 0) last--;
  if (first < 0) return;
  const many = last - first + 1, width = 420, height = 190, w = (width - 8) / many, bottom = height - 22, top = 16;
  const made = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Sequences by length"});
  const most = Math.max(...n.map(x => x / data.n_sequences), ...tokens.map(x => data.n_tokens ? x / data.n_tokens
    : 0));
  for (let i = first; i <= last; i++) {
    const x = 4 + (i - first) * w, low = i === 0 ? 0 : Math.pow(2, i - 1);
    const parts = [[n[i] / data.n_sequences, "var(--bar)"], [data.n_tokens ? tokens[i] / data.n_tokens : 0,
      "var(--bar-alt)"]];
    const group = svg("g", {});
    group.append(svg("title", {}, (i === 0 ? "empty" : count(low) + " to " + count(2 * low - 1) + " tokens") + ": "
      + count(n[i])
      + " sequences, " + percent(parts[0][0]) + "; " + count(tokens[i]) + " tokens, " + percent(parts[1][0])));
    group.append(svg("rect", {x, y: top, width: w, height: bottom - top, fill: "transparent"}));
    parts.forEach(([share, fill], j) => {
      const high = share / most * (bottom - top);
      group.append(svg("rect", {x: x + 1 + j * (w - 2) / 2, y: bottom - high, width: Math.max(1, (w - 4) / 2),
        height: high, fill}));
    });
    made.append(group);
    if ((last - i) % Math.ceil(34 / w) === 0) made.append(svg("text", {x: x + 1, y: height - 7}, i === 0 ? "0"
      : shortCount(low)));
  }
  made.append(svg("line", {x1: 4, x2: width - 4, y1: bottom, y2: bottom, stroke: "var(--line)"}));
  made.append(svg("text", {x: 4, y: 10}, "up to " + percent(most)));
  byId("lengths").append(made, element("div", {class: "legend"},
    element("span", {}, swatch("var(--bar)"), "sequences"), element("span", {}, swatch("var(--bar-alt)"), "tokens"),
    element("span", {}, "from that length to twice as much")));
}

const swatch = fill => element("i", {class: "swatch", style: {background: fill}});

function fillBatch() {
  const plan = data.plans[0];
  const ofRank = data.n_ranks > 1 ? ". Here: those of rank " + data.rank : "";
  byId("chunks-caption").textContent = count(plan.n_chunks) + " chunks of at most " + count(plan.chunk_size)
    + " tokens, " + percent(plan.fill) + " full: " + count(plan.n_standalone) + " standalone (grey), "
    + count(plan.n_dependent) + " dependent, " + count(plan.n_hybrid) + " hybrid, in " + count(plan.n_groups)
    + " groups (a hue each)" + ofRank;
}

function fillControls() {
  data.schedules.forEach((s, i) => {
    const input = element("input", {type: "radio", name: "schedule", value: i});
    input.checked = i === state.schedule;
    input.disabled = !isDrawn(i);
    byId("schedules").append(element("label", isDrawn(i) ? {} : {title: "too many passes to be drawn: "
      + count(s.n_passes)},
      input, element("span", {}, s.name)));
  });
  byId("beside").append(element("option", {value: -1}, "nothing"),
    ...drawable.map(i => element("option", {value: i}, data.schedules[i].name)));
  byId("beside").value = String(state.beside);
}

function fillLegends() {
  const legend = byId("legend"), add = (fill, text) => legend.append(element("span", {}, swatch(fill), text));
  legend.textContent = "";
  if (state.schedule < 0) return;
  const shown = new Set(panels().flatMap(i => data.schedules[i].stages.flatMap(stage => LETTERS.split("")
    .filter(letter => stage.pass.includes(letter) || stage.pass.includes(letter.toLowerCase())))));
  if (state.colours === "pass") for (const letter of LETTERS) if (shown.has(letter)) add(`var(--${letter})`, letter
    + " " + PASS_NAMES[letter]);
  if (state.colours === "group") { add("var(--group0)", "one hue for each group"); add("var(--alone)", "standalone");
    }
  if (state.colours === "pass") legend.append(element("span", {},
    "a stripe above: part of a group; below: activations dropped"));
  if (state.bubbles === "cause") data.causes.forEach((name, i) => add(`var(--cause${i})`, name));
  else add("var(--lane)", "idle");
  const memory = byId("memory-legend"), n = data.schedules[state.schedule].stages.length;
  memory.textContent = "";
  for (let i = 0; i < n && n <= 16; i++) memory.append(element("span", {}, swatch(stageColour(i, n)), "stage " + i));
}

function fillTerms() {
  const s = data.schedules[state.schedule], box = byId("terms");
  box.textContent = "";
  if (!s) return;
  const limit = isDrawn(state.schedule) ? limitOf(scheduleAt(state.schedule)) : null;
  byId("memory-caption").textContent = s.name + ": what each stage holds while a pass runs, in " + (s.memory ?
    "GiB of one GPU" : data.held === "bytes" ? "bytes of --token-bytes"
      : "tokens whose activations are kept (with --model it is GiB)") + "."
    + (limit ? " The limit: " + limit.name + "." : "");
  if (!s.memory) return;
  const keys = Object.keys(data.terms).filter(key => s.memory.some(m => m[key] > 0));
  const table = element("table", {id: "terms-table"}, head(["at its peak", ...s.memory.map((_, i) => "stage " + i)]));
  for (const key of keys) table.append(row([data.terms[key], ...s.memory.map(m => exact(m[key], gib(m[key])))]));
  table.append(row(["in all", ...s.memory.map(m => exact(m.total, gib(m.total)))], {class: "chosen"}));
  box.append(element("div", {class: "scroll"}, table));
}

function fillIdle() {
  const s = data.schedules[state.schedule], box = byId("idle-bars"), table = byId("idle-table");
  box.textContent = table.textContent = "";
  if (!s) return;
  const whole = s.makespan * s.idle.length || 1, sums = data.causes.map((_, c) =>
    s.idle.reduce((sum, stage) => sum + stage[c], 0));
  const idle = sums.reduce((a, b) => a + b, 0);
  byId("idle-sentence").textContent = s.name + ": the stages are idle for " + percent(idle / whole) + " of the time" +
    (s.replayed > 0 ? ", and replay dropped chunks for " + percent(s.replayed / whole) : "") + ".";
  s.idle.forEach((stage, i) => {
    const sum = stage.reduce((a, b) => a + b, 0), bar = element("div", {class: "bar"});
    const piece = (share, fill, text) => { if (share > 0) bar.append(element("i",
      {style: {width: 100 * share + "%", background: fill}, title: text})); };
    piece(1 - sum / s.makespan, "var(--busy)", "passes: " + percent(1 - sum / s.makespan));
    stage.forEach((seconds, c) => piece(seconds / s.makespan, `var(--cause${c})`, data.causes[c] + ": "
      + time(seconds) + ", " + percent(seconds / s.makespan)));
    if (i < 64) box.append(element("span", {}, "stage " + i), bar);
  });
  table.append(head(["cause", unit === "s" ? "seconds, all stages" : unit + ", all stages", "of all stage time"]));
  data.causes.forEach((name, c) => {
    if (!(sums[c] > 0)) return;
    table.append(row([element("td", {class: "words"}, swatch(`var(--cause${c})`), name,
      element("small", {}, CAUSES[name])),
      exact(sums[c], count(sums[c])), exact(sums[c] / whole, percent(sums[c] / whole))]));
  });
  table.append(row(["in all", exact(idle, count(idle)), exact(idle / whole, percent(idle / whole))],
    {class: "chosen"}));
}

function fillRanks() {
  if (!data.ranks) return;
  const timed = data.ranks.filter(r => r.makespan !== undefined), slowest = Math.max(...timed.map(r => r.makespan));
  const mean = timed.reduce((sum, r) => sum + r.makespan, 0) / timed.length, memory = data.ranks.some(r => r.memory);
  byId("ranks-section").hidden = false;
  if (timed.length) byId("ranks-sentence").textContent = "All ranks wait for the slowest: " + time(slowest) + ", "
    + (slowest / mean).toFixed(3) + " times the mean (schedule best).";
  byId("ranks").append(head(["rank", "chunks", "tokens", "attention pairs", unit === "s" ? "seconds" : unit,
    "of the slowest", "idle, replays too",
    ...(memory ? ["fullest GPU"] : [])]));
  data.ranks.forEach((r, i) => byId("ranks").append(row([String(i), exact(r.chunks, count(r.chunks)),
    exact(r.tokens, count(r.tokens)),
    exact(r.pairs, count(r.pairs)), r.makespan === undefined ? "-" : exact(r.makespan, count(r.makespan)),
    r.makespan === undefined ? "-" : rankBar(r.makespan / slowest), r.makespan === undefined ? "-"
      : exact(r.bubble_useful, percent(r.bubble_useful)),
    ...(memory ? [r.memory ? exact(r.memory, gib(r.memory)) : "-"] : [])], i === data.rank ? {class: "chosen"}
      : {})));
}

const rankBar = share => element("div", {class: "bar", style: {width: "120px"}, title: percent(share)},
  element("i", {style: {width: 100 * share + "%", background: "var(--bar)"}}));

function fillErrors() {
  if (!isDrawn(data.measured)) return;
  const predicted = data.schedules[data.predicted], measured = data.schedules[data.measured];
  byId("measured-section").hidden = false;
  byId("measured-sentence").textContent = "Measured " + time(measured.makespan) + ", predicted "
    + time(predicted.makespan) + ": "
    + percent(predicted.makespan / measured.makespan - 1) + " off. Both are in the chart above, one over the other.";
  byId("errors").append(head(["pass", "how many", "measured", "predicted", "sum off by", "each off by, on average"]));
  for (const e of data.errors)
    byId("errors").append(row([e.pass + " " + PASS_NAMES[e.pass], exact(e.n, count(e.n)),
      exact(e.measured, time(e.measured)),
      exact(e.predicted, time(e.predicted)), e.measured > 0 ? exact(e.predicted / e.measured - 1,
        percent(e.predicted / e.measured - 1)) : "-",
      exact(e.off, percent(e.off))]));
}

// ---- all of it ----

readColours();
fillHeader();
fillNumbers();
fillLengths();
fillBatch();
fillControls();
fillRanks();
fillErrors();
listenToChart();
listenToChunks();
listenToControls();
listenToWindow();
if (state.schedule >= 0) choose(state.schedule);
request("chunks");

// Tests and the console look in here.
window.chunkflow = {data, state, scheduleAt, findPass, waitedFor, transferOf, chart, at, show, pan, choose, mark,
  focusOn};
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("chunkflow-drawn")));

})();
