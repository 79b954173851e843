// Memory of each device over the step, a row each, with what it may hold, and what is alive at each peak.
const MANY_DEVICES = 3, ROWS_TOP = 24;

class MemoryChart {
  constructor(data) {
    this.data = data;
    this.view = [0, Math.max(summary.step_ns, 1)];
    this.highest = Math.max(...summary.devices.map(device => device.peak), 1);
    this.limits = [...new Set(summary.devices.map(device => device.limit))];
    this.devices = shownDevices();
    const upTo = $("up-to-limits");
    upTo.checked = Math.max(...this.limits) <= 2 * this.highest;
    upTo.addEventListener("change", () => draw(this.chart));
    this.raster = new Raster();
    this.chart = chart("memory", this.height, width => this.option(width));
    const pixels = this.chart.getZr();
    pixels.on("mousemove", event => this.hover(event));
    pixels.on("globalout", hideTip);
    peakTables(data);
  }

  // the height of a row
  get row() {
    const size = this.devices.length;
    return size <= MANY_DEVICES ? 72 : size <= 8 ? 38 : size <= 16 ? 28 : 18;
  }

  get height() {
    return 80 + this.row * this.devices.length;
  }

  // other devices
  show() {
    this.devices = shownDevices();
    resized(this.chart, this.height);
    peakTables(this.data);
  }

  // the largest value that is drawn
  get top() {
    return 1.04 * ($("up-to-limits").checked ? Math.max(this.highest, ...this.limits) : this.highest);
  }

  option(width) {
    const left = leftOf(width), far = this.limits.filter(limit => limit > this.top), { fontSize, length } = rowNames(width);
    const scale = far.length ? `, the limit${far.length > 1 ? "s" : ""} of ${far.slice(0, 3).map(bytes).join(", ")} above it` : "";
    const name = row => middle(summary.devices[this.devices[row]].name, length);
    return {
      title: { text: `height of a row: ${bytes(this.top)}${isNarrow(width) ? "" : scale}`, left, top: 0, textStyle: { color: css("--quiet"), fontSize: 12, fontWeight: "normal" } },
      grid: { left, right: 16, top: ROWS_TOP, height: this.row * this.devices.length },
      xAxis: stepAxis(width, ...this.view, { showMinLabel: false, showMaxLabel: false, formatter: value => tick(value, this.view[1] - this.view[0]) }),
      yAxis: { ...rowAxis(this.devices.length, { fontSize, lineHeight: 14,
        formatter: row => this.row >= 28 ? `${name(row)}\n${bytes(summary.devices[this.devices[row]].peak)}` : name(row) }),
        splitLine: { show: true, lineStyle: { color: css("--line") } } },
      series: [{ type: "custom", data: [[0, Math.max(summary.step_ns, 1), 0]], encode: { x: [0, 1], y: 2 }, clip: true, silent: true, animation: false,
        progressive: 0, renderItem: params => this.drawRows(params.coordSys) }],
    };
  }

  // each column of pixels as high as the most memory that its device holds in that time
  drawRows(area) {
    const { memoryTimes, memoryBytes, memoryOffsets } = this.data, high = this.row - 5, { top, view } = this;
    const width = (view[1] - view[0]) / area.width;
    this.raster.begin(area.width, area.height);
    this.devices.forEach((number, place) => {
      const device = summary.devices[number], bottom = this.row * (place + 1) - 1, colour = pixel(lineColour(number), 0.85);
      const first = memoryOffsets[number], end = memoryOffsets[number + 1];
      for (let column = 0, at = first; column < area.width; column++) {
        const from = view[0] + column * width;
        at = column ? at : Math.max(above(memoryTimes, from, first, end) - 1, first);
        while (at + 1 < end && memoryTimes[at + 1] <= from) at++;
        let most = memoryBytes[at];
        while (at + 1 < end && memoryTimes[at + 1] < from + width) most = Math.max(most, memoryBytes[++at]);
        const tall = high * most / top;
        if (most) this.raster.rect(column, bottom - tall, 1, tall, colour);
      }
      if (device.limit <= top) this.raster.rect(0, bottom - high * device.limit / top, area.width, 1.5, pixel(css("--bad"), 1));
    });
    this.raster.end();
    return { type: "image", silent: true, style: { image: this.raster.canvas, x: area.x, y: area.y, width: area.width, height: area.height } };
  }

  hover(event) {
    const spot = [event.offsetX, event.offsetY], device = this.devices[Math.floor((event.offsetY - ROWS_TOP) / this.row)];
    if (!this.chart.containPixel({ gridIndex: 0 }, spot) || device === undefined) return hideTip();
    const { memoryTimes, memoryBytes, memoryOffsets } = this.data, ns = this.chart.convertFromPixel({ gridIndex: 0 }, spot)[0];
    const at = Math.max(above(memoryTimes, ns, memoryOffsets[device], memoryOffsets[device + 1]) - 1, memoryOffsets[device]);
    const { name, limit } = summary.devices[device];
    showTip(facts(middle(name, 60), [["at", time(ns)], ["holds", `${bytes(memoryBytes[at])}, ${percent(memoryBytes[at] / Math.max(limit, 1))} of ${bytes(limit)}`]], ""), event.event);
  }

  zoomTo(view) {
    this.view = view;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.chart.setOption({ xAxis: { min: view[0], max: view[1] } }), 120);
  }
}

// what memory is for, in colours of the palette
const PARTS = { parameters: 0, "optimizer state": 1, gradients: 3, "gathered parameters": 4, activations: 2, cache: 4, "recomputed activations": 6, "chunks of exchanges": 5 };
const partColour = part => PARTS[part] === undefined ? OTHER : OKABE_ITO[PARTS[part]];

function peakTables(data) {
  const devices = shownDevices().map(number => summary.devices[number]);
  const parts = Object.keys(devices[0]?.parts ?? {}).filter(part => devices.some(device => device.parts[part]));
  const hasHosts = data.taken.length > 0;
  const headings = ["device", "kind", ">ops", ">busy", ...(hasHosts ? [">waits for its host"] : []), ">peak", ">limit", ">full", ">at"];
  const rows = devices.map(device => ({ cells: [middle(device.name, 40), middle(device.kind, 40), device.ops.toLocaleString("en"), percent(device.busy),
    ...(hasHosts ? [percent(device.host_wait)] : []), bytes(device.peak), bytes(device.limit), percent(device.peak / Math.max(device.limit, 1)), time(device.peak_at)] }));
  const divided = devices.map(device => ({ cells: [middle(device.name, 40), partsBar(device, parts), ...parts.map(part => bytes(device.parts[part]))] }));
  const details = devices.filter(device => device.alive.length).map(device => {
    const listed = table(["<output of", ">bytes", ">from", ">until", ""],
      device.alive.map(item => ({ cells: [element("span", { class: "clip" }, middle(nameOf(data, item.op), 400)), bytes(item.bytes), time(item.from),
        item.until === null ? "the end" : time(item.until), item.copy ? "copy" : ""] })));
    const more = device.alive_more ? element("p", { class: "quiet" }, `and ${count(device.alive_more, "smaller one")}`) : "";
    return element("details", {}, element("summary", {}, `What ${middle(device.name, 60)} holds at its peak, ${bytes(device.peak)}`), listed, more);
  });
  const all = details.length > MANY_DEVICES ? [element("details", {}, element("summary", {}, "What each device holds at its peak"), ...details)] : details;
  const named = element("div", { class: "legend" });
  legend(named, parts.map(part => ({ name: part, colour: partColour(part) })));
  $("peaks").replaceChildren(table(headings, rows), element("h3", {}, "At the peaks"), named,
    table(["device", "", ...parts.map(part => `>${part}`)], divided), ...all);
}

// the parts of a peak side by side
function partsBar(device, parts) {
  const told = parts.map(part => `${part} ${bytes(device.parts[part])}`);
  return splitBar(parts.map((part, at) => ({ share: device.parts[part] / Math.max(device.peak, 1), colour: partColour(part), title: told[at] })), told.join(", "), "peak");
}
