// The timeline: a row for each device and what it sends, or each channel in use, over the step.
const TOP = 8, BOTTOM = 78, MOST_LABELS = 600;

// The blocks of all rows as one picture: thousands of them a frame are too many for shapes of their own.
class Raster {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
  }

  // an empty picture of `width` x `height` pixels of the page
  begin(width, height) {
    this.ratio = devicePixelRatio || 1;
    const across = Math.max(1, Math.round(width * this.ratio)), down = Math.max(1, Math.round(height * this.ratio));
    if (this.canvas.width !== across || this.canvas.height !== down) {
      this.canvas.width = across;
      this.canvas.height = down;
      this.image = this.context.createImageData(across, down);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else this.pixels.fill(0);
    this.across = across;
    this.down = down;
  }

  rect(x, y, width, height, colour, isHatched = false) {
    const { across, pixels, ratio } = this;
    const left = Math.max(0, Math.round(x * ratio)), right = Math.min(across, Math.max(Math.round((x + width) * ratio), left + 1));
    const top = Math.max(0, Math.round(y * ratio)), bottom = Math.min(this.down, Math.round((y + height) * ratio));
    for (let line = top * across; line < bottom * across; line += across) {
      const down = line / across - line; // x + y of a pixel less its number
      for (let at = line + left; at < line + right; at++) if (!isHatched || (at + down) % 6 < 3) pixels[at] = colour;
    }
  }

  end() {
    this.context.putImageData(this.image, 0, 0);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.font = "11px system-ui, sans-serif";
    this.context.textAlign = "center";
    this.context.textBaseline = "middle";
  }

  // after `end`
  text(content, x, y, colour) {
    this.context.fillStyle = colour;
    this.context.fillText(content, x, y);
  }
}

// "#rrggbb" as a pixel of a little-endian machine; `share` of it opaque
const pixel = (colour, share) => {
  const value = parseInt(colour.slice(1), 16);
  return ((Math.round(255 * share) << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
};

class Timeline {
  constructor(data, onZoom) {
    this.data = data;
    Object.assign(this, layOut(data, true), { isFolded: true });
    this.step = Math.max(summary.step_ns, 1);
    this.view = [0, this.step];
    this.matches = null; // Uint8Array [N]: 1 where an op is searched for
    this.found = []; // ops searched for, by start
    this.chosen = null; // {row, index}
    this.onZoom = onZoom;
    this.raster = new Raster();
    this.colour(colourings(data)[0]);
    this.place = $("timeline");
    this.chart = chart("timeline", this.height, width => this.option(width));
    this.chart.on("datazoom", () => this.zoomed());
    this.listen();
  }

  get height() {
    return TOP + BOTTOM + this.band * this.bands.length;
  }

  colour(by) {
    this.colours = colouring(this.data, by);
    this.stretches = null;
    legend($("legend"), this.data.taken.length ? [...this.colours.names, { name: "waits for the host, whose lane is below", colour: HATCHED }] : this.colours.names);
  }

  // one row for each channel, or what a device sends under its own row
  fold(isFolded) {
    if (this.chosen && !this.rows[this.chosen.row].isDevice) this.chosen = null;
    this.layOut(isFolded);
  }

  layOut(isFolded) {
    Object.assign(this, layOut(this.data, isFolded), { isFolded });
    resized(this.chart, this.height);
  }

  // other devices
  show() {
    this.chosen = this.stretches = null;
    $("details").replaceChildren(element("p", { class: "quiet" }, "No op is chosen."));
    this.layOut(this.isFolded);
    if (this.matches) this.search(...this.searched);
  }

  // the row of a device, -1 if it is not shown
  rowOf(device) {
    return this.rows.findIndex(row => row.isDevice && row.device === device);
  }

  option(width) {
    const left = leftOf(width), { fontSize, length } = rowNames(width);
    this.inner = width - left - 16;
    return {
      grid: { left, right: 16, top: TOP, height: this.band * this.bands.length },
      xAxis: stepAxis(width, 0, this.step, { formatter: value => tick(value, this.view[1] - this.view[0]) }),
      yAxis: { ...rowAxis(this.bands.length, { fontSize, width: left - 8, overflow: "truncate", ellipsis: "", formatter: value => middle(this.bands[value], length) }),
        splitLine: { show: true, lineStyle: { color: css("--line") } } },
      dataZoom: [
        { type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: "shift",
          minValueSpan: 20, startValue: this.view[0], endValue: this.view[1], throttle: 16 },
        { type: "slider", filterMode: "none", minValueSpan: 20, startValue: this.view[0], endValue: this.view[1],
          throttle: 16, bottom: 10, height: 22, brushSelect: false, labelFormatter: value => tick(value, this.step),
          textStyle: axisText(), borderColor: css("--line"), fillerColor: "rgba(86,180,233,0.25)", showDetail: !isNarrow(width),
          show: !isPrinting },
      ],
      series: [{ type: "custom", data: [[0, this.step, 0]], encode: { x: [0, 1], y: 2 }, clip: true, silent: true,
        animation: false, progressive: 0, renderItem: (params, api) => this.draw(params.coordSys, api) }],
    };
  }

  draw(area, api) {
    const zero = api.coord([0, 0])[0], scale = (api.coord([this.step, 0])[0] - zero) / this.step;
    const low = (area.x - zero) / scale, high = (area.x + area.width - zero) / scale;
    const { of, colours } = this.colours, { sentBy } = this.data, matches = this.matches;
    const pixels = [...colours.map(colour => pixel(colour, 1)), ...Array(DIM - colours.length).fill(0), ...colours.map(colour => pixel(colour, 0.15))];
    pixels[2 * DIM] = pixel(OTHER, 1);
    this.raster.begin(area.width, area.height);
    const fill = ({ top, height }, lane, colourOf) => {
      for (const [colour, list] of blocks(lane, colourOf, low, high, zero - area.x, scale)) {
        for (let at = 0; at < list.length; at += 3) {
          const tall = height * list[at + 2];
          this.raster.rect(list[at], top + height - tall, list[at + 1], tall, pixels[colour], colour === 2 * DIM);
        }
      }
    };
    const colourOf = op => of[op] + (matches && !matches[op] ? DIM : 0);
    this.rows.forEach(row => {
      if (row.waiting) fill(row, row.waiting, () => 2 * DIM); // behind the ops
      fill(row, row, row.isDevice || row.of ? colourOf : sent => colourOf(sentBy[sent]));
    });
    this.raster.end();
    if (this.colours.label && !matches) this.write(low, high, zero - area.x, scale);
    const children = [{ type: "image", silent: true, style: { image: this.raster.canvas, x: area.x, y: area.y, width: area.width, height: area.height } }];
    if (this.chosen) {
      const row = this.rows[this.chosen.row], x = zero + scale * row.starts[this.chosen.index];
      const width = Math.max(scale * (row.ends[this.chosen.index] - row.starts[this.chosen.index]), 1);
      children.push({ type: "rect", silent: true, style: { fill: "none", stroke: css("--text"), lineWidth: 2 },
        shape: { x: x - 1, y: area.y + row.top - 1, width: width + 2, height: row.height + 2 } });
    }
    return { type: "group", children };
  }

  // labels on the stretches that are wide enough
  write(low, high, offset, scale) {
    const { of, colours, label } = this.colours;
    this.stretches ??= this.rows.filter(row => row.isDevice).map(row => stretches(row, op => of[op], label)); // rows of devices are first
    const inks = colours.map(inkOn);
    let left = MOST_LABELS;
    this.stretches.forEach(({ starts, ends, labels, colours: numbers }, device) => {
      const row = this.rows[device];
      for (let at = above(ends, low); at < starts.length && starts[at] < high && left; at++) {
        if (scale * (ends[at] - starts[at]) < 7 * labels[at].length + 5 || !labels[at]) continue;
        const from = Math.max(starts[at], low), until = Math.min(ends[at], high);
        if (scale * (until - from) < 7 * labels[at].length + 5) continue;
        this.raster.text(labels[at], offset + scale * (from + until) / 2, row.top + row.height / 2 + 1, inks[numbers[at]]);
        left--;
      }
    });
  }

  zoomed() {
    const { startValue, endValue } = this.chart.getOption().dataZoom[0];
    this.view = [startValue, endValue];
    this.onZoom(this.view);
  }

  zoomTo(low, high) {
    const span = Math.min(Math.max(high - low, 20), this.step);
    const start = Math.min(Math.max(low, 0), this.step - span);
    this.chart.dispatchAction({ type: "dataZoom", startValue: start, endValue: start + span });
  }

  // with a part of its length on both sides, and scrolls to the timeline
  bringUp(low, high, share) {
    this.zoomTo(low - (high - low) * share, high + (high - low) * share);
    $("timeline-section").scrollIntoView();
  }

  zoom(factor) {
    const [low, high] = this.view, middleNs = (low + high) / 2, half = (high - low) / 2 * factor;
    this.zoomTo(middleNs - half, middleNs + half);
  }

  pan(share) {
    const [low, high] = this.view, shift = (high - low) * share;
    this.zoomTo(low + shift, high + shift);
  }

  redraw() {
    this.chart.setOption({ series: [{ data: [[0, this.step, 0]] }] });
  }

  listen() {
    const pixels = this.chart.getZr();
    pixels.on("mousemove", event => {
      const hit = this.hit(event.offsetX, event.offsetY);
      if (hit) showTip(this.describe(hit), event.event);
      else hideTip();
    });
    pixels.on("globalout", hideTip);
    pixels.on("click", event => {
      const hit = this.hit(event.offsetX, event.offsetY);
      if (hit) this.choose(hit.row, hit.index, false);
    });
    this.place.addEventListener("keydown", event => this.key(event));
  }

  hit(x, y) {
    if (!this.chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
    const [ns] = this.chart.convertFromPixel({ gridIndex: 0 }, [x, y]);
    const near = 3 * (this.view[1] - this.view[0]) / this.inner;
    const row = this.rows.findIndex(one => y - TOP >= one.top - 1 && y - TOP < one.top + one.height + 1);
    const index = row < 0 ? -1 : itemAt(this.rows[row].waiting ?? this.rows[row], ns, near);
    return index < 0 ? null : { row, index };
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), 0: () => this.zoomTo(0, this.step), Home: () => this.zoomTo(0, this.step),
      ArrowUp: () => this.chooseRow(-1), ArrowDown: () => this.chooseRow(1), "[": () => this.chooseNext(-1), "]": () => this.chooseNext(1),
      c: () => $("fold").click(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // the next row above or below that is not empty
  chooseRow(change) {
    const order = [...this.rows.keys()].filter(row => this.rows[row].items.length).sort((a, b) => this.rows[a].top - this.rows[b].top);
    const row = order[this.chosen ? order.indexOf(this.chosen.row) + change : 0];
    if (row === undefined) return;
    const at = this.chosen ? this.rows[this.chosen.row].starts[this.chosen.index] : this.view[0];
    this.choose(row, Math.min(Math.max(above(this.rows[row].starts, at) - 1, 0), this.rows[row].items.length - 1));
  }

  chooseNext(change) {
    if (!this.chosen) return this.chooseRow(0);
    const index = this.chosen.index + change;
    if (index >= 0 && index < this.rows[this.chosen.row].items.length) this.choose(this.chosen.row, index);
  }

  // keeps an op or a transfer and tells it below; brings it into view if `show`
  choose(row, index, show = true) {
    this.chosen = { row, index };
    $("details").replaceChildren(this.describe(this.chosen));
    const low = this.rows[row].starts[index], high = this.rows[row].ends[index], span = this.view[1] - this.view[0];
    if (show && (high < this.view[0] || low > this.view[1])) this.zoomTo((low + high - span) / 2, (low + high + span) / 2);
    this.redraw();
  }

  chooseOp(op) {
    showDevice(this.data.device[op]);
    const row = this.rowOf(this.data.device[op]);
    const index = this.rows[row].items.indexOf(op), long = Math.max(this.data.finish[op] - this.data.start[op], 50);
    const span = Math.max(Math.min(this.view[1] - this.view[0], 60 * long), 4 * long, this.step / 1000);
    const at = this.data.start[op] + long / 2;
    this.zoomTo(at - span / 2, at + span / 2);
    this.choose(row, index, false);
  }

  describe({ row, index }) {
    const { isDevice, of, items } = this.rows[row], { ends } = of ?? this.rows[row];
    return isDevice || of ? describeOp(this.data, items[index], index ? ends[index - 1] : 0) : describeTransfer(this.data, items[index]);
  }

  // of ops whose name, module or kind has `text` in it, or, if given, of those that `isWanted` takes
  search(text, isWanted = null) {
    const data = this.data, wanted = text.trim().toLowerCase();
    this.matches = null;
    this.searched = [text, isWanted];
    this.found = [];
    if (wanted) {
      const has = names => names.map(name => name.toLowerCase().includes(wanted));
      const inModule = has(data.modules), inKind = has(data.kinds), inName = has(data.names);
      this.matches = new Uint8Array(data.name.length);
      for (let op = 0; op < data.name.length; op++) {
        if (!isShown(data.device[op])) continue;
        if (isWanted ? isWanted(op) : inModule[data.module[op]] || inKind[data.kind[op]] || inName[data.name[op]]) {
          this.matches[op] = 1;
          this.found.push(op);
        }
      }
      this.found.sort((a, b) => data.start[a] - data.start[b]);
    }
    this.at = -1;
    $("found").textContent = wanted ? count(this.found.length, "op") : "";
    this.redraw();
  }

  showFound(change) {
    if (!this.found.length) return;
    this.at = this.at < 0 ? (change > 0 ? 0 : this.found.length - 1) : (this.at + change + this.found.length) % this.found.length;
    $("found").textContent = `${(this.at + 1).toLocaleString("en")} of ${count(this.found.length, "op")}`;
    this.chooseOp(this.found[this.at]);
  }
}

function facts(name, rows, sentence) {
  const list = element("dl", {}, ...rows.filter(row => row[1] !== "").flatMap(([term, value]) => [element("dt", {}, term), element("dd", {}, value)]));
  return element("div", {}, element("div", { class: "name" }, name), list, element("div", {}, sentence));
}

// the op before on the same device ended at `free`
function describeOp(data, op, free) {
  const device = summary.devices[data.device[op]].name, hasHost = data.taken.length > 0;
  const taken = hasHost ? data.taken[op] : data.start[op], waited = data.start[op] - taken;
  return facts(data.names[data.name[op]], [
    ["kind", middle(data.kinds[data.kind[op]], 200)], ["module", middle(data.modules[data.module[op]], 200)],
    ["phase", data.phases[data.phase[op]]], ["micro-batch", microbatchOf(data, op)], ["replica", replicaOf(data, op)], ["ZeRO", cutOf(data, op)],
    ["device", middle(device, 80)],
    ["time", `${time(data.finish[op] - data.start[op])}, from ${time(data.start[op])} to ${time(data.finish[op])}`],
    ["host", hasHost ? `${time(data.issueEnd[op] - data.issueStart[op])}, from ${time(data.issueStart[op])} to ${time(data.issueEnd[op])}` : ""],
    ["makes", data.made[op] ? bytes(data.made[op]) : ""], ["holds", data.resident[op] ? `${bytes(data.resident[op])} all step` : ""],
    ["FLOPs", data.flops[op] ? digits(data.flops[op], 3) : ""],
  ], whyOp(data, op, taken, taken - free) + (waited ? ` Then waits ${time(waited)} for the host.` : ""));
}

// why its device takes an op when it does, idle before
function whyOp(data, op, taken, idle) {
  const input = data.lastInput[op] < 0 ? "" : middle(nameOf(data, data.lastInput[op]), 120);
  switch (data.after[op]) {
    case AT_ONCE: return "Starts with the step.";
    case AFTER_TRANSFER: {
      const sent = data.lastTransfer[op], where = summary.devices[data.from[sent]].name;
      return `${idle ? `Device idle for ${time(idle)}: ` : ""}waited for ${bytes(data.sentBytes[sent])} of ${input} from ${middle(where, 80)}` +
        `, made at ${time(data.finish[data.lastInput[op]])} and there at ${time(data.arrival[sent])}.`;
    }
    case AFTER_OP: return idle ? `Device idle for ${time(idle)}: waited for ${input}.` : `Starts as ${input} ends, whose output it reads.`;
    default: return taken === 0 ? "Starts with the step."
      : data.lastInput[op] < 0 ? `Reads nothing; waited ${time(taken)} for the device.`
      : `Inputs there at ${time(data.ready[op])}; waited ${time(taken - data.ready[op])} for the device.`;
  }
}

function describeTransfer(data, sent) {
  const op = data.sentBy[sent], waited = data.sentStart[sent] - data.finish[op], before = data.sentAfter[sent];
  return facts(`Output of ${nameOf(data, op)}`, [
    ["way", `${middle(summary.devices[data.from[sent]].name, 80)} to ${middle(summary.devices[data.to[sent]].name, 80)}`],
    ["bytes", bytes(data.sentBytes[sent])], ["channel", middle(channelsOf(data, sent), 80)],
    ["time", `${time(data.sentEnd[sent] - data.sentStart[sent])}, from ${time(data.sentStart[sent])}, there at ${time(data.arrival[sent])}`],
  ], before < 0 ? "Starts as soon as the tensor is made."
    : `Waited ${time(waited)} for the channel, behind the output of ${middle(nameOf(data, data.sentBy[before]), 120)}.`);
}

function showTip(content, event) {
  const tip = $("tip"), x = event.clientX ?? event.zrX, y = event.clientY ?? event.zrY;
  tip.replaceChildren(content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 14) : y + 18}px`;
}

function hideTip() {
  $("tip").hidden = true;
}
