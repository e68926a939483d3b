// chart.js - the chart of passes by stage, and its navigation.

const GUTTER = 62, TITLE = 22, AXIS = 26, GAP = 12;
const chart = {lanes: [], titles: [], width: 0};
const strip = makeScratch();

// Returns the scale of a schedule: ticks to pixels.
function scaleOf(s) {
  const perSecond = (chart.width - GUTTER) / (state.to - state.from);
  return ticks => GUTTER + (ticks * s.tick - state.from) * perSecond;
}

const timeAt = x => state.from + (x - GUTTER) / (chart.width - GUTTER) * (state.to - state.from);

// ---- the axis ----

function axisLabel(at, step) {
  const digits = Math.max(0, Math.min(20, -Math.floor(Math.log10(step))));
  if (Math.abs(at) >= 1e15) return at.toPrecision(3);
  if (step >= 1) return count(Math.round(at));
  return step >= 1e-6 ? at.toFixed(digits) : at.toPrecision(3);
}

// Draws marks on the time axis: whole steps, with labels that do not touch. The first one names the unit.
function drawAxis(g, left, width, y, from, to) {
  if (!(to > from)) return;
  const step = roundUp((to - from) * 92 / width), first = Math.ceil(from / step);
  g.fillStyle = colour.quiet;
  for (let i = first; i * step <= to; i++) {
    const x = left + (i * step - from) / (to - from) * width;
    const label = axisLabel(i * step, step) + (i === first ? " " + unit : "");
    g.fillRect(Math.round(x), y - 9, 1, 4);
    if (x + textWidth(g, label) <= left + width) g.fillText(label, x, y + 2);
  }
}

// ---- passes that are narrower than a pixel ----

// Merges a lane's boxes that are narrower than a pixel, from left to right. A column gets the mean colour of its boxes,
// so that its hue shows the most frequent kind, and a pale one partial idling.
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
  const add = (x0, x1, which) => {
    while (x0 < x1) {
      const at = Math.floor(x0), end = Math.min(x1, at + 1);
      if (at !== column) {
        if (column >= 0) endColumn();
        column = at;
      }
      cover[which] += end - x0;
      x0 = end;
    }
  };
  const draw = (g, y, h) => {
    if (column < 0) return;
    endColumn();
    g.imageSmoothingEnabled = false;
    g.drawImage(strip.put(), 0, 0, strip.canvas.width, 1, 0, y, strip.canvas.width, h);
  };
  return {add, draw};
}

// ---- one pass ----

// Returns the colours of a lane: by kind of pass, or by chain with standalone chunks in two greys.
function paletteOf() {
  return state.colours === "pass" ? colour.pass : [...colour.chain, colour.alone, colour.aloneAlt];
}

// Returns the index of a pass's colour in the palette.
function colourOf(s, st, i) {
  if (state.colours === "pass") return st.letter[i];
  const chain = hueOf(s, st.chunk[i]), n = colour.chain.length;
  return chain >= 0 ? chain % n : n + st.chunk[i] % 2;
}

function isMarked(s, st, i) {
  const mark = state.chain;
  if (!mark) return true;
  if (mark.plan !== s.from.plan) return false;
  return mark.chain >= 0 ? chainOf(s, st.chunk[i]) === mark.chain : st.chunk[i] === mark.chunk;
}

function hatch(g) {
  if (colour.hatch) return colour.hatch;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const t = tile.getContext("2d");
  t.strokeStyle = "rgba(0, 30, 90, 0.35)";
  t.beginPath();
  for (const x of [-6, 0, 6]) {
    t.moveTo(x, 6);
    t.lineTo(x + 6, 0);
  }
  t.stroke();
  return colour.hatch = g.createPattern(tile, "repeat");
}

// Draws hatching for replays, a stripe above for a chain, and one below for dropped activations.
function drawMarks(g, s, st, i, x0, w, y, h) {
  const letter = LETTERS[st.letter[i]], chain = hueOf(s, st.chunk[i]);
  if (w > 5 && letter === "R") {
    g.fillStyle = hatch(g);
    g.fillRect(x0, y, w - 0.75, h);
  }
  if (w <= 3 || h <= 12) return;
  if (state.colours === "pass" && chain >= 0) {
    g.fillStyle = chainColour(chain);
    g.fillRect(x0, y, w - 0.75, 3);
  }
  if (goesForward(letter) && !st.kept[i]) {
    g.fillStyle = colour.lane;
    g.fillRect(x0, y + h - 3, w - 0.75, 1.5);
  }
}

const inkOf = (s, st, i) => inkOn(paletteOf()[colourOf(s, st, i)]);

// Draws a pass that is at least a pixel wide, with its name if there is room for all of it.
function drawPass(g, s, st, i, x0, x1, y, h) {
  const w = x1 - x0;
  g.fillStyle = paletteOf()[colourOf(s, st, i)];
  g.fillRect(x0, y, w > 3 ? w - 0.75 : w, h);
  drawMarks(g, s, st, i, x0, w, y, h);
  if (w < 14 || h < 12) return;
  const text = passName(st, i);
  if (textWidth(g, text) > w - 4) return;
  g.fillStyle = inkOf(s, st, i);
  g.fillText(text, x0 + 3, y + h / 2 + 1);
}

// ---- idle time ----

// Draws idle time by cause, in low boxes, so that none is mistaken for a pass of a chain with that hue.
function drawPieces(g, st, y, h, x, from, to) {
  const merger = columnMerger(colour.cause);
  for (let p = firstAbove(st.pieceEnd, from); p < st.pieceEnd.length && st.pieceStart[p] < to; p++)
    merger.add(Math.max(GUTTER, x(st.pieceStart[p])), Math.min(chart.width, x(st.pieceEnd[p])), st.pieceCause[p]);
  merger.draw(g, y, h);
}

// ---- passes too many to be named: the passes of a sequence are one box ----

const LEAST_NAMED = 9, MOST_GROUPED = 20000; // pixels of the mean pass; passes in sight
const MOST_LANES = 16;                       // more leave no room for rows in a lane

// True if n passes are so many that those of a sequence are one box.
const isMany = (s, n) => panels().length * s.stages.length <= MOST_LANES && n <= MOST_GROUPED
  && n * LEAST_NAMED > (chart.width - GUTTER) * s.stages.length;
const isGrouped = s => isMany(s, inSight(s));

// The rows of a lane from above: letters, and their share of the height.
const ROWS = [{letters: "F", part: 0.42}, {letters: "RBI", part: 0.42}, {letters: "W", part: 0.16}];

// Finds the runs of passes of one sequence, or of one standalone chunk, among the passes of a row.
function runsOf(s, st, letters, from, to) {
  const runs = [];
  let run = null;
  for (let i = firstAbove(st.end, from); i < st.n && st.start[i] < to; i++) {
    if (!letters.includes(LETTERS[st.letter[i]])) continue;
    const chunk = st.chunk[i], chain = chainOf(s, chunk);
    if (!run || run.chain !== chain || (chain < 0 && run.low !== chunk))
      runs.push(run = {chain, low: chunk, high: chunk, passes: []});
    run.low = Math.min(run.low, chunk);
    run.high = Math.max(run.high, chunk);
    run.passes.push(i);
  }
  return runs;
}

// Draws a run's name on its own background, if it ends before the next run begins.
function nameRun(g, s, st, run, fill, x0, end, y, h) {
  const letter = LETTERS[st.letter[run.passes[run.passes.length - 1]]];
  const numbers = run.low + (run.high > run.low ? "-" + run.high : "");
  const text = [letter + numbers, numbers].find(name => textWidth(g, name) + 6 <= end - x0);
  if (!text) return;
  g.fillStyle = fill;
  g.fillRect(x0, y + 2, textWidth(g, text) + 5, h - 2);
  g.fillStyle = inkOf(s, st, run.passes[run.passes.length - 1]);
  g.fillText(text, x0 + 2, y + h / 2 + 2);
}

// Draws a row of a lane: a pale box from the first to the last pass of each run, its passes in it, and its name.
function drawRuns(g, lane, letters, y, h) {
  const {s, st} = lane, x = scaleOf(s), paint = paletteOf();
  const runs = runsOf(s, st, letters, state.from / s.tick, state.to / s.tick), merger = columnMerger(paint);
  const left = i => Math.max(GUTTER, x(st.start[i])), right = i => Math.min(chart.width, x(st.end[i]));
  const fillOf = run => paint[colourOf(s, st, run.passes[run.passes.length - 1])];
  g.globalAlpha = 0.2;
  for (const run of runs) {
    const x0 = left(run.passes[0]), x1 = right(run.passes[run.passes.length - 1]);
    g.fillStyle = fillOf(run);
    g.fillRect(x0, y, x1 - x0, h);
    for (const i of run.passes) merger.add(left(i), right(i), colourOf(s, st, i));
  }
  g.globalAlpha = 1;
  merger.draw(g, y, h);
  runs.forEach((run, n) => {
    const x0 = left(run.passes[0]), x1 = right(run.passes[run.passes.length - 1]);
    const hue = hueOf(s, run.low), end = n + 1 < runs.length ? left(runs[n + 1].passes[0]) : chart.width;
    if (state.colours === "pass" && hue >= 0 && h >= 9) {
      g.fillStyle = chainColour(hue);
      g.fillRect(x0, y, x1 - x0, 2);
    }
    g.fillStyle = colour.page;
    if (x1 - x0 > 4) g.fillRect(x0, y, 1, h);
    if (h >= 9) nameRun(g, s, st, run, fillOf(run), x0, end, y, h);
  });
}

function drawGroups(g, lane) {
  const occurs = ({letters}) => lane.s.from.stages.some(stage => new RegExp(`[${letters}]`, "i").test(stage.pass));
  const rows = ROWS.filter(occurs);
  const whole = rows.reduce((sum, {part}) => sum + part, 0);
  let y = lane.y;
  for (const {letters, part} of rows) {
    const h = Math.floor(lane.h * part / whole);
    drawRuns(g, lane, letters, y, h - 1);
    y += h;
  }
}

// ---- a lane ----

function drawLane(g, lane) {
  const {s, st, y, h} = lane, x = scaleOf(s), from = state.from / s.tick, to = state.to / s.tick;
  const low = Math.max(1, Math.round(h / 3));
  g.fillStyle = colour.lane;
  g.fillRect(GUTTER, y, chart.width - GUTTER, h);
  if (state.bubbles === "cause") drawPieces(g, st, y + h - low, low, x, from, to);
  if (isGrouped(s)) drawGroups(g, lane);
  else drawPasses(g, lane, x, from, to);
  if (state.chain) shadeUnmarked(g, s, st, y, h, x, from, to);
}

function drawPasses(g, {s, st, y, h}, x, from, to) {
  const merger = columnMerger(paletteOf());
  for (let i = firstAbove(st.end, from); i < st.n && st.start[i] < to; i++) {
    const x0 = Math.max(GUTTER, x(st.start[i])), x1 = Math.min(chart.width, x(st.end[i]));
    if (x1 - x0 >= 1) drawPass(g, s, st, i, x0, x1, y, h);
    else merger.add(x0, x1, colourOf(s, st, i));
  }
  merger.draw(g, y, h);
}

// Shades everything except the marked chunks.
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

// ---- overlays on the lanes ----

// Counts the passes of a schedule that are in sight.
function inSight(s) {
  const from = state.from / s.tick, to = state.to / s.tick;
  return s.stages.reduce((n, st) => n + firstAbove(st.start, to) - firstAbove(st.end, from), 0);
}

const laneOf = (s, stage) => chart.lanes.find(lane => lane.s === s && lane.stage === stage);

// Draws a line from one lane to another, edge to edge.
function line(g, s, from, fromTicks, to, toTicks) {
  const x = scaleOf(s), a = laneOf(s, from), b = laneOf(s, to), down = b.y > a.y;
  g.moveTo(x(fromTicks), down ? a.y + a.h : a.y);
  g.lineTo(x(toTicks), down ? b.y : b.y + b.h);
}

// Draws transfers, unless they are so many that they would hide everything else. One that left before the visible part
// may arrive in it.
function drawTransfers(g, s) {
  if (!(s.from.latency > 0 || s.from.seconds_per_token > 0) || inSight(s) > 1500) return;
  const from = (state.from - (state.to - state.from)) / s.tick;
  g.strokeStyle = colour.quiet;
  g.lineWidth = 1;
  g.beginPath();
  s.stages.forEach((st, stage) => {
    for (let i = firstAbove(st.end, from); i < st.n && st.start[i] * s.tick < state.to; i++) {
      const transfer = transferOf(s, stage, i);
      if (transfer) line(g, s, stage, transfer.left, transfer.taker[0], transfer.arrived);
    }
  });
  g.stroke();
}

function drawCritical(g, s) {
  const x = scaleOf(s), path = s.from.path;
  g.strokeStyle = colour.mark;
  g.lineWidth = 2;
  g.beginPath();
  for (let p = 0; p < path.length; p += 2) {
    const stage = path[p], i = path[p + 1], st = s.stages[stage], lane = laneOf(s, stage);
    if (p >= 2 && path[p - 2] !== stage)
      line(g, s, path[p - 2], s.stages[path[p - 2]].end[path[p - 1]], stage, st.start[i]);
    if (x(st.end[i]) < GUTTER || x(st.start[i]) > chart.width) continue;
    g.moveTo(x(st.start[i]), lane.y + lane.h - 1);
    g.lineTo(x(st.end[i]), lane.y + lane.h - 1);
  }
  g.stroke();
}

// Draws the focused pass, and a dashed line from the pass on another stage that it waited for.
function drawFocus(g) {
  const f = state.focus;
  if (!f) return;
  const s = scheduleAt(f.schedule), lane = laneOf(s, f.stage);
  if (!lane) return;
  const x = scaleOf(s), st = s.stages[f.stage], x0 = x(st.start[f.i]);
  const bound = waitedFor(s, f.stage, f.i);
  g.strokeStyle = colour.mark;
  g.lineWidth = 2;
  g.strokeRect(x0, lane.y, Math.max(2, x(st.end[f.i]) - x0), lane.h);
  if (!bound || bound[0] === f.stage) return;
  g.setLineDash([4, 3]);
  g.beginPath();
  line(g, s, bound[0], s.stages[bound[0]].end[bound[1]], f.stage, st.start[f.i]);
  g.stroke();
  g.setLineDash([]);
}

// ---- the whole chart ----

// Returns a lane's height: readable if stages are few, larger if all passes are in rows, smaller if the stages are so
// many that a browser's canvas would end.
function laneHeight(s) {
  const n = s.stages.length, lanes = n * Math.max(1, panels().length);
  const most = isMany(s, s.stages.reduce((sum, st) => sum + st.n, 0)) ? 46 : 26;
  return Math.min(Math.max(7, Math.min(most, Math.floor(560 / lanes))), 16000 / lanes);
}

// Fills chart.lanes and chart.titles; returns the height.
function layOut() {
  let y = 0;
  chart.lanes = [];
  chart.titles = [];
  for (const index of panels()) {
    const s = scheduleAt(index), h = laneHeight(s);
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

// Draws the stages' names if they do not touch.
function drawLabels(g, height) {
  g.fillStyle = colour.page;
  g.fillRect(0, 0, GUTTER, height);
  g.fillStyle = colour.ink;
  for (const {s: {from}, y} of chart.titles) {
    const text = `${from.name}, ${from.measured ? time(from.makespan) : shownTime(from.makespan)}`;
    const replays = from.replayed > 0 ? `, replays ${percent(replayShare(from))}` : "";
    g.fillText(`${text}, idle ${percent(from.bubble_busy)}${replays}`, 0, y + TITLE / 2);
  }
  let last = -99;
  g.fillStyle = colour.quiet;
  for (const lane of chart.lanes) {
    if (lane.y - last < 12 && lane.stage > 0) continue;
    last = lane.y;
    g.fillText("stage " + lane.stage, 0, lane.y + lane.h / 2 + 1);
  }
}

painters.gantt = function () {
  chart.width = widthOf(byId("gantt"));
  const height = layOut(), {g, width} = prepare(byId("gantt"), height);
  for (const lane of chart.lanes) drawLane(g, lane);
  byId("grouped").hidden = !panels().some(i => isGrouped(scheduleAt(i)));
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
};

// ---- pointing ----

// Finds the item at a point of the chart: {schedule, stage, i}, or {schedule, stage, piece}, or null.
function at(x, y) {
  const lane = chart.lanes.find(l => y >= l.y && y < l.y + l.h + 2);
  if (!lane || x < GUTTER) return null;
  const {s, st, stage} = lane, ticks = timeAt(x) / s.tick, found = {schedule: s.index, stage};
  const i = firstAbove(st.end, ticks);
  if (i < st.n && st.start[i] <= ticks) return {...found, i};
  const piece = firstAbove(st.pieceEnd, ticks);
  return piece < st.pieceEnd.length && st.pieceStart[piece] <= ticks ? {...found, piece} : null;
}

function words(found) {
  if (!found) return "";
  const s = scheduleAt(found.schedule);
  return found.i !== undefined ? passWords(s, found.stage, found.i) : gapWords(s, found.stage, found.piece);
}

// follow: the chart moves so that the pass is visible.
function focusOn(found, follow) {
  state.focus = found && found.i !== undefined ? found : null;
  byId("details").textContent = words(found) || "Point at a pass or touch it; the arrow keys go to the next.";
  if (state.focus && follow) {
    const s = scheduleAt(found.schedule), st = s.stages[found.stage], half = (state.to - state.from) / 2;
    const start = st.start[found.i] * s.tick, end = st.end[found.i] * s.tick, middleOf = (start + end) / 2;
    if (start < state.from || end > state.to) show(middleOf - half, middleOf + half);
  }
  request("gantt");
}

// Marks the chain of a pass, or its chunk if it has none; a second call clears the mark.
function mark(found) {
  if (!found || found.i === undefined) state.chain = null;
  else {
    const s = scheduleAt(found.schedule), chunk = s.stages[found.stage].chunk[found.i], chain = chainOf(s, chunk);
    const before = state.chain && state.chain.plan === s.from.plan ? state.chain : null;
    const same = before && (chain >= 0 ? before.chain === chain : before.chunk === chunk);
    state.chain = same ? null : {plan: s.from.plan, chain, chunk};
  }
  request("gantt", "chunks");
}

// ---- moving ----

function show(from, to) {
  const whole = span(), width = Math.max(whole * 1e-7, Math.min(whole, to - from));
  state.from = Math.max(0, Math.min(from, whole - width));
  state.to = state.from + width;
  request("gantt", "memory");
}

function zoom(factor, where) {
  const width = (state.to - state.from) / factor, before = (where - state.from) / (state.to - state.from);
  show(where - before * width, where + (1 - before) * width);
}

const pan = part => show(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));
const middle = () => (state.from + state.to) / 2;

// Shows the schedule that is `by` places after the current one.
function step(by) {
  const i = drawable.indexOf(state.schedule);
  choose(drawable[(i + by + drawable.length) % drawable.length]);
}

// Moves to the pass next to the focused one, or to the one at that time on the stage above or below.
function walk(dx, dy) {
  if (state.schedule < 0) return;
  const s = scheduleAt(state.focus ? state.focus.schedule : state.schedule);
  if (!state.focus) {
    focusOn({schedule: s.index, stage: 0, i: 0}, true);
    return;
  }
  let {stage, i} = state.focus;
  const from = s.stages[stage];
  if (dx) i = Math.max(0, Math.min(from.n - 1, i + dx));
  else if (stage + dy >= 0 && stage + dy < s.stages.length) {
    const ticks = (from.start[i] + from.end[i]) / 2;
    stage += dy;
    i = Math.min(s.stages[stage].n - 1, firstAbove(s.stages[stage].end, ticks));
  }
  focusOn({schedule: s.index, stage, i}, true);
}

// Shows the first pass of a chunk, and marks its chain.
function findChunk(chunk) {
  if (state.schedule < 0) return;
  const s = scheduleAt(state.schedule), place = findPass(s, "F", chunk, 0);
  if (!place) {
    byId("details").textContent = `There is no chunk ${chunk} here: those of this rank are ${s.plan.first_chunk} to `
      + `${s.plan.first_chunk + s.plan.chunks.chain.length - 1}.`;
    return;
  }
  const st = s.stages[place[0]], middleOf = (st.start[place[1]] + st.end[place[1]]) / 2 * s.tick;
  const half = Math.min(span() / 2, 10 * (st.end[place[1]] - st.start[place[1]]) * s.tick);
  state.chain = null;
  show(middleOf - half, middleOf + half);
  focusOn({schedule: s.index, stage: place[0], i: place[1]});
  mark(state.focus);
}

// ---- the visible part as SVG ----

const MOST_SAVED = 20000;

function savedLane(out, lane) {
  const {s, st, y, h} = lane, x = scaleOf(s), from = state.from / s.tick, to = state.to / s.tick, paints = paletteOf();
  const box = (x0, x1, top, height, fill, title) => {
    const made = svg("rect", {x: x0.toFixed(2), y: top, width: Math.max(0, x1 - x0).toFixed(2), height, fill});
    made.append(svg("title", {}, title));
    out.append(made);
  };
  out.append(svg("text", {x: 0, y: y + h / 2 + 4, fill: colour.ink}, "stage " + lane.stage));
  for (let p = 0; p < st.pieceEnd.length && state.bubbles === "cause"; p++)
    if (st.pieceEnd[p] > from && st.pieceStart[p] < to)
      box(Math.max(GUTTER, x(st.pieceStart[p])), Math.min(chart.width, x(st.pieceEnd[p])), y + h - Math.round(h / 3),
        Math.round(h / 3), colour.cause[st.pieceCause[p]], data.causes[st.pieceCause[p]]);
  for (let i = firstAbove(st.end, from); i < st.n && st.start[i] < to; i++) {
    const x0 = Math.max(GUTTER, x(st.start[i])), x1 = Math.min(chart.width, x(st.end[i])), name = passName(st, i);
    box(x0, x1, y, h, paints[colourOf(s, st, i)], name);
    if (x1 - x0 > 7 * name.length + 4 && h >= 12)
      out.append(svg("text", {x: (x0 + 3).toFixed(2), y: y + h / 2 + 4, fill: inkOf(s, st, i)}, name));
  }
}

// Draws times at both ends of the axis, the title of each schedule, and its lanes.
function chartAsSvg() {
  const height = layOut(), out = svg("svg", {xmlns: "http://www.w3.org/2000/svg", width: chart.width, height,
    viewBox: `0 0 ${chart.width} ${height}`, "font-family": "Helvetica, Arial, sans-serif", "font-size": 11});
  out.append(svg("rect", {width: chart.width, height, fill: colour.page}));
  for (const {s, y} of chart.titles)
    out.append(svg("text", {x: 0, y: y + TITLE / 2 + 4, fill: colour.ink},
      s.from.name + ", " + shownTime(s.from.makespan)));
  for (const lane of chart.lanes) savedLane(out, lane);
  [[GUTTER, "start", state.from], [chart.width, "end", state.to]].forEach(([x, anchor, value]) =>
    out.append(svg("text", {x, y: height - 6, "text-anchor": anchor, fill: colour.ink}, number(value) + " " + unit)));
  return new XMLSerializer().serializeToString(out);
}

function saveChart() {
  const many = panels().reduce((n, i) => n + inSight(scheduleAt(i)), 0);
  if (many > MOST_SAVED) {
    byId("details").textContent = `${count(many)} passes in sight are too many for a picture: zoom in first.`;
    return;
  }
  const address = URL.createObjectURL(new Blob([chartAsSvg()], {type: "image/svg+xml"}));
  element("a", {href: address, download: "chunkflow.svg"}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function toggleCritical() {
  byId("critical").checked = state.critical = !state.critical;
  request("gantt");
}

function clearMarks() {
  state.chain = null;
  focusOn(null);
  request("chunks");
}

const keys = {
  ArrowLeft: () => walk(-1, 0), ArrowRight: () => walk(1, 0), ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1),
  Enter: () => mark(state.focus), " ": () => mark(state.focus), Escape: clearMarks,
  "+": () => zoom(1.6, middle()), "=": () => zoom(1.6, middle()), "-": () => zoom(1 / 1.6, middle()),
  "0": () => show(0, span()), PageUp: () => pan(-0.5), PageDown: () => pan(0.5),
  Home: () => show(0, state.to - state.from), End: () => show(span() - (state.to - state.from), span()),
  "[": () => step(-1), "]": () => step(1), c: toggleCritical
};

const hasModifier = event => event.ctrlKey || event.metaKey || event.altKey;

// Moves the chart on dragging; a press that does not move is a click.
function listenToDrags(canvas) {
  let grip = null;
  canvas.addEventListener("pointermove", event => {
    if (!grip) {
      showTip(words(at(event.offsetX, event.offsetY)), event);
      return;
    }
    grip.moved = grip.moved || Math.abs(event.offsetX - grip.x) > 3;
    if (!grip.moved) return;
    const moved = (event.offsetX - grip.x) / (chart.width - GUTTER) * (grip.to - grip.from);
    canvas.classList.add("moving");
    showTip("");
    show(grip.from - moved, grip.to - moved);
  });
  canvas.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    grip = {x: event.offsetX, from: state.from, to: state.to, moved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  const release = () => {
    const clicked = grip && !grip.moved;
    grip = null;
    canvas.classList.remove("moving");
    return clicked;
  };
  canvas.addEventListener("pointerup", event => {
    if (!release()) return;
    const found = at(event.offsetX, event.offsetY);
    focusOn(found);
    mark(found);
  });
  canvas.addEventListener("pointercancel", release);
}

// Leaves a vertical wheel to the page's scrolling; a horizontal one moves the chart, and with Ctrl it zooms.
function listenToWheel(canvas) {
  canvas.addEventListener("wheel", event => {
    const across = event.shiftKey ? event.deltaY : event.deltaX, down = event.shiftKey ? 0 : event.deltaY;
    if (hasModifier(event)) zoom(Math.pow(1.0025, -event.deltaY), timeAt(event.offsetX));
    else if (Math.abs(across) > Math.abs(down)) pan(across / (chart.width - GUTTER));
    else return;
    event.preventDefault();
  }, {passive: false});
}

function listenToChart() {
  const canvas = byId("gantt");
  listenToDrags(canvas);
  listenToWheel(canvas);
  canvas.addEventListener("pointerleave", event => showTip("", event));
  canvas.addEventListener("dblclick", event => zoom(2.5, timeAt(event.offsetX)));
  canvas.addEventListener("keydown", event => {
    const action = keys[event.key];
    if (!action || hasModifier(event)) return;
    showTip("");
    action();
    event.preventDefault();
  });
  canvas.addEventListener("focus", () => {
    if (!state.focus && canvas.matches(":focus-visible")) walk(0, 0);
  });
}
