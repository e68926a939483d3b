// page.js - shared by all parts of a page: elements, numbers, colours, canvases, the tip. All text from outside is set
// through textContent, never through markup. The scripts of tools/report/ are put into one function, in the order in
// which report.html.in names them.

const byId = id => document.getElementById(id);

// Returns the data of a part of the page; null if the page does not have that part.
const readData = id => JSON.parse(byId(id).textContent);

// ---- elements ----

// options: attributes, "class", and "style" as an object.
function element(tag, options, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (key === "class") made.className = value;
    else if (key === "style") setStyle(made, value);
    else made.setAttribute(key, value);
  }
  for (const child of children)
    if (child !== null) made.append(child instanceof Node ? child : String(child));
  return made;
}

function setStyle(made, properties) {
  for (const [name, text] of Object.entries(properties)) made.style.setProperty(name, text);
}

function svg(tag, options, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const swatch = fill => element("i", {class: "swatch", style: {background: fill}});

// Makes a table row; a cell that is not an element becomes one.
function row(cells, options) {
  const made = element("tr", options);
  for (const cell of cells) made.append(cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell));
  return made;
}

const head = names => element("tr", {}, ...names.map(name => element("th", {scope: "col"}, name)));

// ---- numbers ----

const inWhole = new Intl.NumberFormat("en-US"), inSix = new Intl.NumberFormat("en-US", {maximumSignificantDigits: 6});
const isWhole = x => Math.abs(x) < 9e15 && x === Math.trunc(x);
const count = x => isWhole(x) ? inWhole.format(x) : number(x);

// ---- a narrow page ----

const narrow = matchMedia("(max-width: 760px)");

// Keeps the columns of these names on a narrow page; the style sheet hides the others there.
function keepOnNarrow(table, names) {
  const kept = [...table.rows[0].cells].map(cell => names.includes(cell.textContent));
  for (const line of table.rows) [...line.cells].forEach((cell, i) => cell.classList.toggle("minor", !kept[i]));
}

function number(x) {
  if (!Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return x.toPrecision(6);
  return inSix.format(x);
}

// Formats 11 seconds as 11.0, in text and tables alike.
const inThree = new Intl.NumberFormat("en-US", {minimumSignificantDigits: 3, maximumSignificantDigits: 3});

function estimate(x) {
  if (!Number.isFinite(x)) return String(x);
  if (x === 0) return "0";
  return Math.abs(x) < 1e-4 || Math.abs(x) >= 1e15 ? x.toPrecision(3) : inThree.format(x);
}

// Returns the speed of chunks beside whole sequences, as [number, words]. A slowdown is not called "0.8 x as fast".
function pace(before, after, memory) {
  const part = memory[0] > 0 ? `, with ${Math.round(100 * memory[1] / memory[0])} % of their memory` : "";
  if (after <= before) return [`${estimate(before / after)} \u00d7`, " as fast as whole sequences" + part];
  if (after >= 10 * before) return [`${estimate(after / before)} \u00d7`, " as slow as whole sequences" + part];
  return [`${Math.round(100 * (after / before - 1))} %`, " slower than whole sequences" + part];
}
const offloadWords = offload => offload & 1 ? ", checkpoints in host memory" : "";
const percent = x => (100 * x).toFixed(2) + " %";
const gib = x => (x / 1073741824).toFixed(2) + " GiB";

// Returns a number as text, with its exact value for programs that read the page.
const exact = (value, text) => element("data", {value: String(value)}, text);

// 8192 becomes 8K.
function shortCount(x) {
  for (const [size, letter] of [[1 << 30, "G"], [1 << 20, "M"], [1024, "K"]])
    if (x >= size && x % size === 0) return x / size + letter;
  return count(x);
}

// Returns the smallest of 1, 2, 5, 10, ... times a power of ten that is not below x.
function roundUp(x) {
  const power = Math.pow(10, Math.floor(Math.log10(x)));
  for (const step of [1, 2, 5, 10]) if (power * step >= x) return power * step;
  return 10 * power;
}

// ---- colours ----

const LETTERS = "FRBIW";
let colour = {};

// Reads the style sheet's colours, for drawing on a canvas.
function readColours(nCauses) {
  const style = getComputedStyle(document.documentElement);
  const get = name => style.getPropertyValue("--" + name).trim();
  colour = {
    page: get("page"), panel: get("panel"), ink: get("ink"), quiet: get("quiet"), line: get("line"),
    lane: get("lane"), accent: get("accent"), mark: get("mark"), shade: get("shade"), limit: get("limit"),
    alone: get("alone"), aloneAlt: get("alone-alt"),
    pass: [...LETTERS].map(get),
    chain: [0, 1, 2, 3, 4, 5, 6, 7].map(i => get("chain" + i)),
    cause: Array.from({length: nCauses}, (_, i) => get("cause" + i)),
    hatch: null // made when it is first needed
  };
}

const chainColour = chain => colour.chain[chain % colour.chain.length];

// Returns a colour as a pixel of an ImageData.
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

// Returns black or white, whichever is more readable on a colour.
function inkOn(text) {
  const pixel = pixelOf(text), part = [0, 8, 16].map(bits => Math.pow((pixel >> bits & 255) / 255, 2.2));
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2] > 0.18 ? "#10141a" : "#ffffff";
}

// ---- canvases ----

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";

const onPaper = () => document.documentElement.classList.contains("paper");

const widthOf = canvas => Math.max(120, canvas.clientWidth || canvas.parentNode.clientWidth);

// Clears a canvas and scales it to be sharp; returns its context, which is in CSS pixels.
function prepare(canvas, height) {
  const ratio = Math.max(window.devicePixelRatio || 1, onPaper() ? 2 : 1);
  const width = widthOf(canvas);
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

// Cached, because measuring a text takes longer than drawing it.
const widths = new Map();

function textWidth(g, text) {
  if (!widths.has(text)) {
    if (widths.size > 20000) widths.clear();
    widths.set(text, g.measureText(text).width);
  }
  return widths.get(text);
}

// Makes a canvas for setting pixels, which is then drawn onto another: one picture instead of thousands of boxes.
function makeScratch() {
  const canvas = document.createElement("canvas"), scratch = {canvas, image: null, cells: null};
  scratch.clear = (width, height) => {
    if (scratch.image && canvas.width === width && canvas.height === height) {
      scratch.cells.fill(0);
      return;
    }
    [canvas.width, canvas.height] = [width, height];
    scratch.image = new ImageData(width, height);
    scratch.cells = new Uint32Array(scratch.image.data.buffer);
  };
  scratch.put = () => {
    canvas.getContext("2d").putImageData(scratch.image, 0, 0);
    return canvas;
  };
  return scratch;
}

// ---- drawing when the browser is ready ----

const painters = {}; // by name; each part of the page adds its own
const waiting = {};

function request(...names) {
  for (const name of names) {
    if (waiting[name]) continue;
    waiting[name] = true;
    requestAnimationFrame(() => {
      waiting[name] = false;
      painters[name]();
    });
  }
}

// ---- the tip next to the pointer ----

function showTip(text, event) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const below = event.clientY + 18 + box.height <= innerHeight;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (below ? event.clientY + 18 : Math.max(4, event.clientY - box.height - 10)) + "px";
}
