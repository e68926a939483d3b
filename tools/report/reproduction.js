// reproduction.js - the page of chunkflow reproduce: the paper's numbers compared with ours, as tables and small
// charts.

function startReproduction(reproduction) {
  byId("reproduction-page").hidden = false;
  document.title = "chunkflow reproduce";
  for (const sheet of reproduction.sheets) byId("sheets").append(makeSheet(sheet));
}

// Makes a cell's text, with its number as data if it has one.
const shownCell = cell => cell.value === undefined ? cell.text : exact(cell.value, cell.text);

function makeSheet(sheet) {
  const id = "sheet-" + sheet.name, charts = makeCharts(sheet);
  return element("section", {"aria-labelledby": id, "data-sheet": sheet.name},
    element("h2", {id}, sheet.title),
    charts.length ? element("div", {class: "charts"}, ...charts) : null,
    element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers: " + sheet.title},
      makeSheetTable(sheet)),
    makeNotes(sheet),
    element("p", {class: "quiet"}, "Assumed: " + sheet.assumptions));
}

function makeSheetTable(sheet) {
  const table = element("table", {}), groups = sheet.columns.some(c => c.group);
  if (groups) table.append(groupRow(sheet.columns));
  table.append(head(sheet.columns.map(c => c.title)));
  for (const cells of sheet.rows) table.append(row(sheet.columns.map(c => shownCell(cells[c.key]))));
  return table;
}

// Makes a heading over all columns of a group.
function groupRow(columns) {
  const made = element("tr", {});
  for (let i = 0; i < columns.length;) {
    let n = 1;
    while (i + n < columns.length && columns[i + n].group === columns[i].group) n++;
    made.append(element("th", {colspan: n, scope: "colgroup"}, columns[i].group || ""));
    i += n;
  }
  return made;
}

function makeNotes(sheet) {
  if (!sheet.notes.length) return null;
  return element("p", {class: "notes"}, ...sheet.notes.flatMap(note => [note.name + ": ",
    ...(note.paper ? [shownCell(note.paper), " in the paper, "] : []), shownCell(note.ours),
    note.paper ? " here. " : ". "]));
}

// ---- charts ----

const ROLES = {
  paper: {stroke: "var(--ink)", dash: "5 4", width: 1.75},
  ours: {stroke: "var(--bar)", dash: "", width: 4}, // wide, so that it is visible below another that is almost the same
  best: {stroke: "var(--bar-alt)", dash: "", width: 1.75},
  unsplit: {stroke: "var(--limit)", dash: "", width: 1.75}
};

function makeCharts(sheet) {
  const names = [...new Set(sheet.series.map(s => s.chart))];
  return names.map(name => makeChart(name, sheet.series.filter(s => s.chart === name), sheet.x_title, sheet.y_title,
    names.length > 1));
}

// Makes the scales. The points have few x values, spread evenly in the logarithm if they span more than a factor of 8.
function makeScales(series, box) {
  const xs = series.flatMap(s => s.x), ys = series.flatMap(s => s.y);
  const [least, most] = [Math.min(...xs), Math.max(...xs)], log = least > 0 && most > 8 * least;
  const place = v => log ? Math.log(v) : v, span = place(most) - place(least) || 1;
  const step = roundUp(Math.max(...ys) / 5), top = Math.ceil(Math.max(...ys) / step) * step;
  return {
    x: v => box.left + (place(v) - place(least)) / span * (box.right - box.left),
    y: v => box.bottom - v / top * (box.bottom - box.top),
    marks: [...new Set(xs)].sort((a, b) => a - b), step, top
  };
}

function drawScales(made, scales, box, small) {
  for (let v = 0; v <= scales.top * (1 + 1e-9); v += scales.step) {
    const y = scales.y(v);
    made.append(svg("line", {x1: box.left, x2: box.right, y1: y, y2: y, stroke: "var(--line)"}),
      svg("text", {x: box.left - 5, y: y + 4, "text-anchor": "end"}, number(Number(v.toPrecision(6)))));
  }
  let free = -Infinity;
  for (const mark of scales.marks) {
    const text = mark >= 1024 ? shortCount(mark) : number(mark), half = 3.2 * text.length + (small ? 2 : 4);
    if (scales.x(mark) - half < free) continue;
    free = scales.x(mark) + half;
    made.append(svg("text", {x: scales.x(mark), y: box.bottom + 15, "text-anchor": "middle"}, text));
  }
}

// Draws a line with its points, each with a title.
function drawSeries(series, scales) {
  const {stroke, dash, width} = ROLES[series.role], group = svg("g", {"data-series": series.name});
  const points = series.x.map((x, i) => [scales.x(x), scales.y(series.y[i])]);
  if (points.length > 1)
    group.append(svg("polyline", {points: points.map(p => p.join()).join(" "), fill: "none", stroke,
      "stroke-width": width, "stroke-dasharray": dash}));
  points.forEach(([cx, cy], i) => {
    const point = svg("circle", {cx, cy, r: points.length > 1 ? 3 : 4.5,
      fill: points.length > 1 ? stroke : "var(--page)",
      stroke, "stroke-width": 1.75, tabindex: 0, "data-x": series.x[i], "data-y": series.y[i]});
    point.append(svg("title", {}, `${series.name}: ${number(series.y[i])} at ${count(series.x[i])}`));
    group.append(point);
  });
  return group;
}

// Draws names at the ends of lines if they do not touch; otherwise only the points' titles name them.
function drawNames(made, series, scales, box) {
  const ends = series.filter(s => s.x.length > 1).map(s => ({name: s.name, role: s.role,
    y: scales.y(s.y[s.y.length - 1]) + 4})).sort((a, b) => a.y - b.y);
  let free = box.top;
  for (const end of ends) {
    const y = Math.max(end.y, free);
    free = y + 12;
    made.append(svg("text", {x: box.right + 8, y, style: `fill: ${ROLES[end.role].stroke}`}, end.name));
  }
}

function makeChart(name, series, xTitle, yTitle, small) {
  const [width, height] = small ? [270, 190] : [640, 280];
  const box = {left: 34, right: width - (small ? 12 : 120), top: 22, bottom: height - 36};
  const made = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "group",
    "aria-label": `${name}: ${yTitle} by ${xTitle}`});
  const scales = makeScales(series, box);
  drawScales(made, scales, box, small);
  for (const s of series) made.append(drawSeries(s, scales));
  if (!small) drawNames(made, series, scales, box);
  made.append(svg("text", {x: 0, y: 10}, yTitle),
    svg("text", {x: box.right, y: height - 4, "text-anchor": "end"}, xTitle));
  return element("figure", {class: small ? "small chart" : "chart"}, element("figcaption", {}, name), made,
    chartLegend(series, small));
}

function chartLegend(series, small) {
  const legend = element("div", {class: "legend"});
  const points = series.some(s => s.x.length === 1) ? [["the paper's", "paper"]] : [];
  const names = small ? series.map(s => [s.name, s.role]) : points;
  for (const [text, role] of names)
    legend.append(element("span", {}, element("i", {class: "swatch " + (small ? "" : "round"),
      style: small ? {background: ROLES[role].stroke} : {"border-color": ROLES[role].stroke}}), text));
  return legend;
}
