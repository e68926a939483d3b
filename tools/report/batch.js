// batch.js - the lengths of a batch, and its chunks as bars of slices.

// ---- lengths ----

// Lists the buckets that have sequences: the beginning of each, and its shares of sequences and tokens.
function lengthBuckets() {
  const {sequences, tokens} = data.lengths, buckets = [];
  for (let i = 0; i < sequences.length; i++)
    buckets.push({low: i === 0 ? 0 : Math.pow(2, i - 1), n: sequences[i], tokens: tokens[i],
      shares: [sequences[i] / data.n_sequences, data.n_tokens ? tokens[i] / data.n_tokens : 0]});
  const first = buckets.findIndex(b => b.n > 0);
  while (buckets.length > first + 1 && buckets[buckets.length - 1].n === 0) buckets.pop();
  return first < 0 ? [] : buckets.slice(first);
}

const bucketRange = b => b.low === 0 ? "0: empty"
  : `${shortCount(b.low)}: ${count(b.low)} to ${count(2 * b.low - 1)} tokens`;

function bucketWords(b) {
  return `${bucketRange(b)}; ${count(b.n)} sequences, ${percent(b.shares[0])}; `
    + `${count(b.tokens)} tokens, ${percent(b.shares[1])}`;
}

function drawBucket(b, x, w, top, bottom, most) {
  const group = svg("g", {});
  group.append(svg("title", {}, bucketWords(b)));
  group.append(svg("rect", {x, y: top, width: w, height: bottom - top, fill: "transparent"})); // to be pointed at
  b.shares.forEach((part, j) => {
    const height = part / most * (bottom - top);
    group.append(svg("rect", {x: x + 1 + j * (w - 2) / 2, y: bottom - height, width: Math.max(1, (w - 4) / 2), height,
      fill: j === 0 ? "var(--bar)" : "var(--bar-alt)"}));
  });
  return group;
}

function fillLengths() {
  const buckets = lengthBuckets(), n = buckets.length;
  if (!n) return;
  const width = 420, height = 190, top = 16, bottom = height - 22, w = (width - 8) / n;
  const most = Math.max(...buckets.flatMap(b => b.shares)), each = Math.ceil(34 / w); // room for a label
  const made = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Sequences by length"});
  buckets.forEach((b, i) => {
    const x = 4 + i * w;
    made.append(drawBucket(b, x, w, top, bottom, most));
    if ((n - 1 - i) % each === 0) made.append(svg("text", {x: x + 1, y: height - 7}, shortCount(b.low)));
  });
  made.append(svg("line", {x1: 4, x2: width - 4, y1: bottom, y2: bottom, stroke: "var(--line)"}));
  made.append(svg("text", {x: 4, y: 10}, "highest: " + percent(most)));
  byId("lengths").replaceChildren(made, element("div", {class: "legend"},
    element("span", {}, swatch("var(--bar)"), "of the sequences"),
    element("span", {}, swatch("var(--bar-alt)"), "of the tokens"),
    element("span", {}, bucketRange(buckets[n - 1]))));
}

// ---- chunks ----

const CHUNKS_HEIGHT = 190;
const bars = {n: 0, left: 38, width: 0};

painters.chunks = function () {
  const {g, width} = prepare(byId("chunks"), CHUNKS_HEIGHT), plan = data.plans[0], n = plan.chunks.chain.length;
  const bottom = CHUNKS_HEIGHT - AXIS, top = 8, w = (width - bars.left) / Math.max(1, n);
  const y = tokens => bottom - tokens / plan.chunk_size * (bottom - top), last = String(plan.first_chunk + n - 1);
  bars.n = n;
  bars.width = width;
  g.fillStyle = colour.lane;
  g.fillRect(bars.left, top, width - bars.left, bottom - top);
  if (w >= 3) for (let i = 0; i < n; i++) drawBar(g, plan, i, bars.left + i * w, w > 5 ? w - 1.5 : w - 0.5, y);
  else if (w >= 1) drawWholeColumns(g, plan, n, w, y);
  else drawBarColumns(g, plan.chunks, width, w, y, bottom);
  g.fillStyle = colour.quiet;
  g.fillText(count(plan.chunk_size), 0, top + 4);
  g.fillText("0", 0, bottom - 4);
  g.fillText("chunk " + plan.first_chunk, bars.left, CHUNKS_HEIGHT - 12);
  g.fillText(last, width - textWidth(g, last), CHUNKS_HEIGHT - 12);
};

function isChunkMarked(plan, i) {
  const mark = state.chain;
  if (!mark || mark.plan !== 0) return true;
  return mark.chain >= 0 ? plan.chunks.chain[i] === mark.chain : mark.chunk === i + plan.first_chunk;
}

// Draws a chain's slices at the bottom, in its hue, and those of whole sequences in two greys.
function drawBar(g, plan, i, x, w, y) {
  const of = plan.chunks, chain = (of.tree || of.chain)[i];
  let at = 0;
  g.globalAlpha = isChunkMarked(plan, i) ? 1 : 0.25;
  if (!of.slices) {
    g.fillStyle = chain >= 0 ? chainColour(chain) : colour.alone;
    g.fillRect(x, y(of.tokens[i]), w, y(0) - y(of.tokens[i]));
  }
  slicesOf(plan, i).forEach((slice, j) => {
    const height = y(at) - y(at + slice.length);
    g.fillStyle = chain >= 0 && (j === 0 || slice.begin > 0) ? chainColour(chain)
      : j % 2 ? colour.aloneAlt : colour.alone;
    g.fillRect(x, y(at + slice.length), w, height > 3 ? height - 0.75 : height);
    at += Math.ceil(slice.length / plan.align) * plan.align;
  });
  g.globalAlpha = 1;
}

// Draws chunks narrower than three pixels: without gaps, because edges that share a pixel would blur.
function drawWholeColumns(g, plan, n, w, y) {
  const at = i => Math.round(bars.left + i * w);
  for (let i = 0; i < n; i++) drawBar(g, plan, i, at(i), at(i + 1) - at(i), y);
}

// Draws chunks narrower than a pixel: each column shows how full its chunks are, and the dependent share of that.
function drawBarColumns(g, of, width, w, y, bottom) {
  const chunkAt = x => Math.floor((x - bars.left) / w);
  for (let x = bars.left; x < width; x++) {
    const from = chunkAt(x), to = Math.min(of.chain.length, Math.max(from + 1, chunkAt(x + 1)));
    let tokens = 0, dependent = 0;
    for (let i = from; i < to; i++) {
      tokens += of.tokens[i];
      if (of.chain[i] >= 0) dependent += of.tokens[i];
    }
    if (to <= from) continue;
    for (const [sum, fill] of [[tokens, colour.alone], [dependent, colour.chain[0]]]) {
      g.fillStyle = fill;
      g.fillRect(x, y(sum / (to - from)), 1, bottom - y(sum / (to - from)));
    }
  }
}

function fillBatch() {
  const plan = data.plans[0];
  byId("chunks-caption").textContent = `${count(plan.n_chunks)} chunks of at most ${count(plan.chunk_size)} tokens, `
    + `${percent(plan.fill)} full`
    + (plan.rows ? `. ${count(plan.rows)} rows are computed for ${count(data.n_tokens)} tokens, because sequences `
      + "share what they begin with" : "")
    + (data.n_ranks > 1 ? `. Here: those of rank ${data.rank}` : "");
  fillChunkLegend(plan);
}

// Counts the chunks that are drawn; with several ranks, those of one.
function fillChunkLegend(plan) {
  const kinds = plan.chunks.chain.map((_, i) => kindOf(plan.chunks, i));
  const hues = new Set((plan.chunks.tree || plan.chunks.chain).filter((_, i) => plan.chunks.chain[i] >= 0)).size;
  byId("chunks-legend").textContent = "";
  const add = (kind, fill, text) => kinds.includes(kind) && byId("chunks-legend").append(element("span", {},
    swatch(fill), `${count(kinds.filter(k => k === kind).length)} ${kind}: ${text}`));
  add("standalone", "var(--alone)", "whole sequences");
  add("dependent", "var(--chain0)", (plan.rows ? "a shared beginning or its branches" : "a part of a long sequence")
    + (hues > 1 ? `, a hue for each of ${count(hues)}` : ""));
  add("hybrid", "linear-gradient(var(--alone) 50%, var(--chain0) 50%)", "both in one chunk");
}

// ---- pointing at chunks ----

function listenToChunks() {
  const canvas = byId("chunks");
  let chosen = -1;
  const chunkAt = x => {
    const i = Math.floor((x - bars.left) / (bars.width - bars.left) * bars.n);
    return x >= bars.left && i >= 0 && i < bars.n ? i : -1;
  };
  const say = i => `chunk ${data.plans[0].first_chunk + i}: ${chunkWords(data.plans[0], i)}`;
  const markChunk = i => {
    const plan = data.plans[0];
    chosen = i;
    state.chain = {plan: 0, chain: plan.chunks.chain[i], chunk: plan.first_chunk + i};
    request("gantt", "chunks");
  };
  canvas.addEventListener("pointermove", event => {
    const i = chunkAt(event.offsetX);
    showTip(i >= 0 ? say(i) : "", event);
  });
  canvas.addEventListener("pointerleave", event => showTip("", event));
  canvas.addEventListener("click", event => {
    const i = chunkAt(event.offsetX);
    if (i >= 0) markChunk(i);
  });
  canvas.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      state.chain = null;
      request("gantt", "chunks");
    }
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    markChunk(Math.max(0, Math.min(bars.n - 1, chosen + (event.key === "ArrowRight" ? 1 : -1))));
    byId("details").textContent = say(chosen);
    event.preventDefault();
  });
}
