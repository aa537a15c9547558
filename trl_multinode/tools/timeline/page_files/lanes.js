// The timeline: a lane per rank and engine, drawn for a window of time that the user moves.
const LANE = 20, HEAD = 22, FOOT = 34, LABEL = 118, SMALL_LABEL = 84;
const SHAPES = { swap: ["\u25bc", "swap"], lost: ["\u2716", "lost"], restart: ["\u25b2", "restart"], agent: ["\u25c6", "agents"] };

class Lanes {
  constructor(canvas, data, phases, onWindow) {
    Object.assign(this, { canvas, data, phases, onWindow });
    this.most = Math.max(1, ...data.lanes.flatMap((lane) => lane.rows.map((row) => row[1])));
    this.show(0, data.seconds);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("mouseleave", () => tip(null, null));
  }

  get label() { return this.canvas.clientWidth < 600 ? SMALL_LABEL : LABEL; }
  get wide() { return Math.max(1, this.canvas.clientWidth - this.label - 6); }
  x(at) { return this.label + ((at - this.from) / (this.to - this.from)) * this.wide; }
  time(x) { return this.from + ((x - this.label) / this.wide) * (this.to - this.from); }

  show(from, to) {
    const span = Math.min(Math.max(to - from, 1e-3), this.data.seconds || 1);
    this.from = Math.min(Math.max(0, from), Math.max(0, this.data.seconds - span));
    this.to = this.from + span;
    this.draw();
    this.onWindow(this.from, this.to);
  }

  zoom(factor, at = (this.from + this.to) / 2) { this.show(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  move(share) { const by = (this.to - this.from) * share; this.show(this.from + by, this.to + by); }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
  }

  grab(event) {
    const start = event.clientX, from = this.from, to = this.to;
    const drag = (moved) => {
      const by = ((start - moved.clientX) / this.wide) * (to - from);
      this.show(from + by, to + by);
    };
    const drop = () => { window.removeEventListener("pointermove", drag); window.removeEventListener("pointerup", drop); };
    window.addEventListener("pointermove", drag);
    window.addEventListener("pointerup", drop);
  }

  draw() {
    const { context, width, height } = surface(this.canvas, HEAD + FOOT + LANE * this.data.lanes.length);
    context.save();
    context.beginPath(); context.rect(this.label, 0, width - this.label, height); context.clip();
    this.drawSteps(context, height);
    this.data.lanes.forEach((lane, index) => this.drawLane(context, lane, HEAD + index * LANE));
    this.drawTimes(context, height);
    context.restore();
    this.drawLabels(context, width);
  }

  drawSteps(context, height) {
    context.fillStyle = context.strokeStyle = style("--dim");
    let free = -1;
    for (const [step, at] of this.data.steps) {
      const x = this.x(at);
      if (x < this.label - 1 || x < free) continue;
      context.textAlign = "left";
      const name = `step ${step}`;
      if (x + 3 + context.measureText(name).width < this.canvas.clientWidth) context.fillText(name, x + 3, 13);
      context.globalAlpha = 0.4;
      context.beginPath(); context.moveTo(x, 4); context.lineTo(x, height - FOOT); context.stroke();
      context.globalAlpha = 1;
      free = x + 56;
    }
  }

  drawLane(context, lane, top) {
    const hasRows = lane.rows.some((row) => row[1] > 0);
    for (const [start, seconds, phase] of lane.pieces) {
      if (start + seconds < this.from || start > this.to) continue;
      const left = this.x(start), right = this.x(start + seconds);
      context.fillStyle = this.phases[phase][1];
      const pale = hasRows && this.phases[phase][0] === "generate";
      context.globalAlpha = pale ? 0.35 : 1;
      context.fillRect(left, top + 2, Math.max(right - left, 0.5), LANE - 4);
      context.globalAlpha = 1;
      if (pale) this.drawRows(context, lane, start, start + seconds, top);
    }
    context.textAlign = "center";
    for (const [kind, at] of lane.marks) {
      context.fillStyle = kind === "swap" || kind === "agent" ? style("--text") : style("--bad");
      context.fillText(SHAPES[kind][0], this.x(at), top + 7);
    }
  }

  drawRows(context, lane, start, end, top) {
    lane.rows.forEach(([at, rows], index) => {
      const until = index + 1 < lane.rows.length ? lane.rows[index + 1][0] : end;
      const left = Math.max(start, at), right = Math.min(end, until);
      if (right <= left || right < this.from || left > this.to) return;
      const high = ((LANE - 4) * rows) / this.most;
      context.fillRect(this.x(left), top + LANE - 2 - high, Math.max(this.x(right) - this.x(left), 0.5), high);
    });
  }

  drawTimes(context, height) {
    context.fillStyle = style("--dim");
    for (const at of ticks(this.from, this.to, Math.max(2, this.wide / 110))) {
      tickName(context, `${short(at + this.data.offset)} s`, this.x(at), height - 19, this.label, this.canvas.clientWidth);
    }
    axisName(context, "seconds since the start", this.label, this.canvas.clientWidth, height);
  }

  drawLabels(context, width) {
    context.strokeStyle = style("--line");
    this.data.lanes.forEach((lane, index) => {
      const top = HEAD + index * LANE, first = !index || this.data.lanes[index - 1].node !== lane.node;
      context.textAlign = "left";
      context.fillStyle = style("--dim");
      if (first) {
        context.fillText(this.label < LABEL ? `n${lane.node}` : `node ${lane.node}`, 0, top + 14);
        context.beginPath(); context.moveTo(0, top); context.lineTo(width, top); context.stroke();
      }
      context.textAlign = "right";
      context.fillStyle = style("--text");
      context.fillText(lane.name, this.label - 6, top + 14);
    });
  }

  hover(event) {
    const lane = this.data.lanes[Math.floor((event.offsetY - HEAD) / LANE)];
    const at = this.time(event.offsetX);
    if (!lane || at < this.from) { tip(event, null); return; }
    const near = ((this.to - this.from) / this.wide) * 5;
    const mark = lane.marks.find((each) => Math.abs(each[1] - at) < near);
    const piece = lane.pieces.find(([start, seconds]) => start <= at && at < start + seconds);
    const lines = [`node ${lane.node}, ${lane.name}, ${short(at + this.data.offset)} s`];
    if (mark) lines.push(`${SHAPES[mark[0]][1]}: ${mark[2]}`);
    if (piece) {
      lines.push(`${this.phases[piece[2]][0]} ${short(piece[1])} s${piece[3] ? `, step ${piece[3]}` : ""}`);
      if (piece[4]) lines.push(piece[4]);
      const rows = lane.rows.filter((row) => row[0] <= at).pop();
      if (rows && this.phases[piece[2]][0] === "generate") lines.push(`${rows[1]} rows`);
    }
    tip(event, lines);
  }
}
