// Fills the page from its data.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);

function table(head, rows, kind) {
  const made = element("table", undefined, kind), first = element("tr");
  for (const name of head) first.append(element("th", name));
  if (head.length) made.append(first);
  for (const row of rows) {
    const line = element("tr");
    for (const cell of row) line.append(element("td", cell === null || cell === undefined ? "" : String(cell)));
    made.append(line);
  }
  return made;
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function legend(box, names) {
  for (const [name, color] of names) {
    const item = element("span"), square = element("i");
    square.style.background = color;
    item.append(square, name);
    box.append(item);
  }
}

function fillHead() {
  const model = data.run.model ? `${data.run.model}: ` : "";
  document.title = by("title").textContent = `${model}${data.title}`;
  const begun = data.started ? `started ${new Date(data.started * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC` : "";
  by("facts").textContent = [begun, data.versions.trl_multinode && `trl_multinode ${data.versions.trl_multinode}`]
    .filter(Boolean).join(", ");
  for (const note of data.notes) by("notes").append(element("li", note));
  const failed = data.endings.find((ending) => ending.code !== 0);
  const verdict = by("verdict");
  verdict.className = failed ? "bad" : data.endings.length ? "good" : "";
  verdict.textContent = failed ? `ended with code ${failed.code}: ${failed.cause}`
    : data.later ? "a later attempt has replaced the files of this one's ending"
    : data.endings.length ? "ended well" : "no ending file: the run goes on, or all of a node's processes were killed at once";
}

function fillEndings() {
  const box = by("endings");
  if (data.endings.length) {
    box.append(table(["node", "code", "phase", "step", "time", "continues from"], data.endings.map((each) =>
      [each.node, each.code, each.phase, each.step, each.time, each.continues ? each.checkpoint : "-"]), "facts"));
  }
  if (data.losses.length) {
    box.append(element("p", "Engines that were lost:"));
    box.append(table(["node", "engine", "at", "cause"], data.losses.map((each) => [each.node, each.lane, `${each.at} s`, each.what]), "facts"));
  }
  if (!box.childElementCount) box.append(element("p", "Nothing is recorded.", "hint"));
}

function fillOverview() {
  const found = data.overview.filter(([, metric]) => metric in data.metrics);
  if (!found.length) by("overview").append(element("p", "The run has no logs.", "hint"));
  const canvases = found.map(([name, metric]) => {
    const box = element("div"), canvas = element("canvas");
    box.append(element("p", name === metric ? name : `${name}: ${metric}`, "hint"), canvas);
    by("overview").append(box);
    return canvas;
  });
  return () => canvases.forEach((canvas, index) => lineChart(canvas, data.metrics[found[index][1]], 150));
}

function fillCompletions() {
  const { step, of, columns, rows } = data.completions, box = by("completions");
  if (!rows) { box.append(element("p", "None are recorded; log_completions=True writes some with each log.", "hint")); return; }
  const more = rows.length < of ? `: those of the highest and of the lowest advantage, ${rows.length} of ${of}` : "";
  const made = table(columns, rows, "facts");
  for (const name of ["prompt", "completion"]) {
    const place = columns.indexOf(name) + 1;
    for (const cell of place ? made.querySelectorAll(`td:nth-child(${place})`) : []) cell.replaceChildren(element("div", cell.textContent));
  }
  box.append(element("p", `Log of step ${step}${more}`, "hint"), made);
}

function fillMetrics() {
  const names = Object.keys(data.metrics), choice = by("metric");
  if (!names.length) { by("chart").replaceWith(element("p", "The run has no logs.", "hint")); choice.parentElement.remove(); return () => {}; }
  for (const name of names) choice.append(element("option", name));
  choice.value = ["reward", "rewards/mean", "loss"].find((name) => names.includes(name)) || names[0];
  const draw = () => lineChart(by("chart"), data.metrics[choice.value], 240);
  choice.onchange = draw;
  return draw;
}

function fillBars() {
  const { bars, phases } = data;
  legend(by("bar-legend"), bars.phases.map((phase) => phases[phase]));
  const nodes = Object.keys(bars.nodes);
  const most = Math.max(1e-3, ...nodes.flatMap((node) => bars.nodes[node].map((row) => row.reduce((sum, each) => sum + each, 0))));
  const canvases = nodes.map((node) => {
    const canvas = element("canvas");
    by("bars").append(element("p", `node ${node}`), canvas);
    return canvas;
  });
  return () => canvases.forEach((canvas, index) => barChart(canvas, bars, bars.nodes[nodes[index]], most, phases));
}

function fillTimeline() {
  const { timeline, phases } = data;
  const seconds = phases.map(() => 0);
  for (const lane of timeline.lanes) for (const piece of lane.pieces) seconds[piece[2]] += piece[1];
  const visible = timeline.seconds * timeline.lanes.length * 1e-4;
  legend(by("legend"), phases.filter((_, index) => seconds[index] > visible));
  const kinds = new Set(timeline.lanes.flatMap((lane) => lane.marks.map((mark) => mark[0])));
  const names = { swap: "weights replaced in flight", lost: "engine lost", restart: "engine started again", agent: "engines of an agent came or left" };
  for (const kind of kinds) by("legend").append(element("span", `${SHAPES[kind][0]} ${names[kind]}`));
  const lanes = new Lanes(by("lanes"), timeline, phases, (from, to) => {
    by("window").textContent = `${short(from + timeline.offset)} to ${short(to + timeline.offset)} s`;
  });
  const starts = [...timeline.steps, [null, timeline.seconds]];
  for (const [step] of timeline.steps) by("step").append(element("option", String(step)));
  by("step").onchange = () => {
    const index = by("step").selectedIndex;
    lanes.show(starts[index][1], starts[index + 1][1]);
  };
  by("in").onclick = () => lanes.zoom(0.5);
  by("out").onclick = () => lanes.zoom(2);
  by("left").onclick = () => lanes.move(-0.5);
  by("right").onclick = () => lanes.move(0.5);
  by("all").onclick = () => lanes.show(0, timeline.seconds);
  const last = timeline.steps.slice(-4)[0];
  if (last) { lanes.show(last[1], timeline.seconds); by("step").value = String(last[0]); }
  return () => lanes.draw();
}

function fillSettings() {
  const rows = (pairs) => Object.entries(pairs).map(([name, value]) => [name, asText(value)]);
  by("settings").append(table(["set in this run", ""], rows(data.settings)));
  const rest = element("details");
  rest.append(element("summary", "Settings of node mode at their defaults"), table([], rows(data.defaults)));
  by("settings").append(rest);
  by("versions").append(table(["run", ""], [...rows(data.run), ...rows(data.versions)]));
}

fillHead();
fillEndings();
fillSettings();
fillCompletions();
const drawn = [fillOverview(), fillMetrics(), fillBars(), fillTimeline()];
const redraw = () => drawn.forEach((draw) => draw());
redraw();
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
