// Drawing on canvases that follow the width of the page: a line per metric, stacked bars per node.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};

// Returns the context of a canvas in pixels of the page, cleared.
function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

// Returns about `count` round numbers between two values.
function ticks(low, high, count) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => span / each <= count);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const short = (value) => (Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3)
  ? value.toExponential(2) : String(Number(value.toPrecision(4))));

function tip(event, lines) {
  const box = document.getElementById("tip");
  box.hidden = !lines;
  if (!lines) return;
  box.replaceChildren(...lines.map((line) => element("div", line)));
  const right = event.clientX + 14 + box.offsetWidth > document.documentElement.clientWidth;
  box.style.left = `${Math.max(0, right ? event.clientX - box.offsetWidth - 10 : event.clientX + 14)}px`;
  box.style.top = `${event.clientY + 14}px`;
}

// Writes a text around `x`, or beside it where an edge would cut it.
function tickName(context, text, x, y, left, right) {
  const half = context.measureText(text).width / 2;
  context.textAlign = "center";
  context.fillText(text, Math.min(Math.max(x, left + half), right - half), y);
}

function axisName(context, name, left, width, height) {
  context.textAlign = "center";
  context.fillText(name, (left + width - 8) / 2, height - 5);
}

// Draws a metric. `points` are [step, value].
function lineChart(canvas, points, tall) {
  const { context, width, height } = surface(canvas, tall);
  const left = 56, bottom = 34, top = 8;
  let low = Math.min(...points.map((point) => point[1])), high = Math.max(...points.map((point) => point[1]));
  if (low === high) { low -= 1; high += 1; }
  const first = points[0][0], last = points[points.length - 1][0];
  const x = (step) => left + ((width - left - 8) * (step - first)) / (last - first || 1);
  const y = (value) => top + ((height - top - bottom) * (high - value)) / (high - low);
  context.strokeStyle = style("--line");
  context.fillStyle = style("--dim");
  context.lineWidth = 1;
  for (const value of ticks(low, high, tall / 48)) {
    context.beginPath(); context.moveTo(left, y(value)); context.lineTo(width - 8, y(value)); context.stroke();
    context.textAlign = "right"; context.fillText(short(value), left - 6, y(value) + 4);
  }
  for (const step of ticks(first, last, Math.max(2, width / 120)).filter(Number.isInteger)) {
    tickName(context, short(step), x(step), height - 20, 0, width);
  }
  axisName(context, "step", left, width, height);
  context.strokeStyle = "#0072b2";
  context.lineWidth = 1.8;
  context.beginPath();
  points.forEach(([step, value], index) => (index ? context.lineTo(x(step), y(value)) : context.moveTo(x(step), y(value))));
  context.stroke();
  if (points.length < 60) {
    context.fillStyle = "#0072b2";
    for (const [step, value] of points) { context.beginPath(); context.arc(x(step), y(value), 2.5, 0, 7); context.fill(); }
  }
  canvas.onmousemove = (event) => {
    const at = event.offsetX;
    const near = points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best));
    tip(event, [`step ${near[0]}`, short(near[1])]);
  };
  canvas.onmouseleave = () => tip(null, null);
}

// Draws one bar per step, stacked by phase. `rows` has the seconds of each phase by step; `most` is the highest bar.
function barChart(canvas, bars, rows, most, phases) {
  const { context, width, height } = surface(canvas, 110);
  const left = 56, bottom = 32, top = 4;
  const wide = (width - left - 8) / rows.length;
  const y = (seconds) => top + (height - top - bottom) * (1 - seconds / most);
  context.fillStyle = style("--dim");
  context.textAlign = "right";
  for (const value of ticks(0, most, 2)) context.fillText(`${short(value)} s`, left - 6, y(value) + 4);
  rows.forEach((row, index) => {
    let from = 0;
    row.forEach((seconds, place) => {
      context.fillStyle = phases[bars.phases[place]][1];
      const over = y(from + seconds), under = y(from);
      context.fillRect(left + index * wide, over, Math.max(wide - (wide > 4 ? 1 : 0), 0.5), under - over);
      from += seconds;
    });
  });
  context.fillStyle = style("--dim");
  const every = Math.ceil(rows.length / Math.max(2, width / 70));
  bars.steps.forEach((step, index) => {
    if (index % every === 0) tickName(context, String(step), left + (index + 0.5) * wide, height - 18, 0, width);
  });
  axisName(context, "step", left, width, height);
  canvas.onmousemove = (event) => {
    const index = Math.floor((event.offsetX - left) / wide);
    if (!rows[index]) { tip(event, null); return; }
    tip(event, [`step ${bars.steps[index]}`, ...rows[index].map((seconds, place) =>
      `${phases[bars.phases[place]][0]} ${short(seconds)} s`)]);
  };
  canvas.onmouseleave = () => tip(null, null);
}
