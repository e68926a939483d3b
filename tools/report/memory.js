// memory.js - draws the amount that each stage holds over time.

const MEMORY_HEIGHT = 220, MEMORY_TOP = 14;
const plot = makeScratch();

// Returns {all, name} of the limit for which a schedule was made; null if there is none.
function limitOf(s) {
  const from = s.from;
  if (data.held === "bytes" && !data.limit_bytes) return null;
  if (data.held === "bytes" && from.memory)
    return {all: data.limit_bytes, name: gib(data.limit_bytes)
      + (data.gpu_memory ? ` of the ${gib(data.gpu_memory)} of one ${data.gpu}` : "")};
  if (data.held === "bytes") return {all: data.limit_bytes, name: held(data.limit_bytes)};
  if (!from.limits) return null;
  const chunks = Math.max(...from.limits) / from.virtual_stages, all = chunks * data.chunk_size;
  return {all, name: `${number(chunks)} chunks on the stage that has most, if all are full: ${held(all)}`};
}

const isDark = () => !onPaper() && matchMedia("(prefers-color-scheme: dark)").matches;

function stageColour(stage, n) {
  const t = n > 1 ? stage / (n - 1) : 0.5;
  return `hsl(${Math.round(262 - 212 * t)} 62% ${isDark() ? 62 : 42}%)`;
}

// Draws a stage's line: each column of pixels goes from the least to the most held in it.
function drawHeld(s, stage, y, ratio) {
  const st = s.stages[stage], width = plot.canvas.width, left = GUTTER * ratio;
  const scale = (width - left) / (state.to - state.from), x = t => left + (t * s.tick - state.from) * scale;
  const paint = pixelOf(stageColour(stage, s.stages.length)), thick = Math.round(1.5 * ratio);
  const first = Math.max(0, firstAbove(st.end, state.from / s.tick) - 1);
  let column = Math.ceil(left), low = st.held[first], high = low, last = low;
  const fillColumn = () => {
    const top = Math.round(y(high * share(s)) * ratio), bottom = Math.round(y(low * share(s)) * ratio) + thick;
    for (let at = top * width + column; at < bottom * width; at += width) plot.cells[at] = paint;
  };
  const goTo = end => {
    for (; column < end; column++) {
      fillColumn();
      low = high = last;
    }
  };
  for (let i = first; i < st.n && st.start[i] * s.tick < state.to; i++) {
    if (i === 0) column = Math.max(column, Math.floor(x(st.start[0])));
    goTo(Math.min(width, Math.floor(x(st.start[i]))));
    last = st.held[i];
    low = Math.min(low, last);
    high = Math.max(high, last);
  }
  if (st.n) goTo(Math.min(width, Math.ceil(x(st.end[st.n - 1]))));
}

// ---- the names of the lines ----

const MOST_NAMED = 8; // more names than this would hide the lines

// Returns what a stage holds at a time in ticks; -1 before its first pass and after its last.
function heldAt(st, ticks) {
  const i = firstAbove(st.start, ticks) - 1;
  return i < 0 || ticks > st.end[st.n - 1] ? -1 : st.held[i];
}

// Names each line at the place farthest from other lines and existing names.
function nameLines(g, s, y) {
  const n = s.stages.length, places = 40, taken = [];
  if (n > MOST_NAMED) return;
  for (let stage = 0; stage < n; stage++) {
    let best = null;
    for (let p = 1; p < places; p++) {
      const x = GUTTER + p / places * (chart.width - GUTTER), own = heldAt(s.stages[stage], timeAt(x + 18) / s.tick);
      const at = y(own * share(s)) - 7;
      if (own < 0 || x + 44 > chart.width) continue;
      const near = [0, 18, 36].flatMap(dx => s.stages.map(st => heldAt(st, timeAt(x + dx) / s.tick)));
      const lines = near.filter((held, i) => held >= 0 && (i % n !== stage || held !== own));
      const room = Math.min(40, ...lines.map(held => Math.abs(y(held * share(s)) - at)),
        ...taken.map(t => Math.hypot(Math.max(0, Math.abs(t.x - x) - 44), t.at - at)));
      if (!best || room > best.room) best = {x, at, room};
    }
    if (!best) continue;
    taken.push(best);
    g.lineWidth = 3;
    g.lineJoin = "round";
    g.strokeStyle = colour.page;
    g.strokeText("stage " + stage, best.x, best.at);
    g.fillStyle = stageColour(stage, n);
    g.fillText("stage " + stage, best.x, best.at);
  }
}

function peakOf(s) {
  let most = 0;
  for (const st of s.stages) for (let i = 0; i < st.n; i++) if (st.held[i] > most) most = st.held[i];
  return most * share(s);
}

// Returns the largest of KiB, MiB, ... in which x is at least two.
function memoryUnit(x) {
  const names = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0, size = 1;
  while (i < 4 && x >= 2 * 1024 * size) {
    size *= 1024;
    i++;
  }
  return {name: names[i], size};
}

function drawMemoryScale(g, width, top, y) {
  const bytes = data.held === "bytes", {size, name} = bytes ? memoryUnit(top) : {size: 1, name: ""};
  const between = roundUp(top / 5 / size) * size;
  for (let value = 0; value <= top; value += between) {
    g.fillStyle = colour.line;
    g.fillRect(GUTTER, Math.round(y(value)), width - GUTTER, 1);
    g.fillStyle = colour.quiet;
    g.fillText(bytes ? number(value / size) + " " + name : count(value) + (value ? "" : " tokens"), 0, y(value));
  }
}

function drawLimit(g, width, limit, y) {
  g.lineWidth = 1;
  g.strokeStyle = g.fillStyle = colour.limit;
  g.setLineDash([6, 4]);
  g.beginPath();
  g.moveTo(GUTTER, y(limit.all));
  g.lineTo(width, y(limit.all));
  g.stroke();
  g.setLineDash([]);
  g.fillText(limit.name, Math.max(0, width - textWidth(g, limit.name) - 2), y(limit.all) - 8);
}

// Returns the limit to draw. One far above all held amounts would flatten the lines: it is only named.
function shownLimit(s) {
  const limit = limitOf(s), peak = s.peak || (s.peak = peakOf(s) || 1);
  return limit && limit.all <= 2 * peak ? limit : null;
}

painters.memory = function () {
  const canvas = byId("memory"), {g, width} = prepare(canvas, MEMORY_HEIGHT);
  if (!isDrawn(state.schedule)) return;
  const s = scheduleAt(state.schedule), shown = shownLimit(s);
  const top = 1.06 * (shown ? Math.max(s.peak, shown.all) : s.peak), bottom = MEMORY_HEIGHT - AXIS;
  const y = value => bottom - value / top * (bottom - MEMORY_TOP);
  drawMemoryScale(g, width, top, y);
  plot.clear(canvas.width, canvas.height);
  s.stages.forEach((_, stage) => drawHeld(s, stage, y, canvas.width / width));
  g.drawImage(plot.put(), 0, 0, width, MEMORY_HEIGHT);
  nameLines(g, s, y);
  if (shown) drawLimit(g, width, shown, y);
  drawAxis(g, GUTTER, width - GUTTER, MEMORY_HEIGHT - 10, state.from, state.to);
};
