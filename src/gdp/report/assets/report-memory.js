// Memory of each device over the step, with what it may hold, and what is alive at each peak: lines of few devices,
// which would cover one another where there are more; those have a row each.
const MOST_LINES = 3, ROWS_TOP = 24;

class MemoryChart {
  constructor(data) {
    this.data = data;
    this.view = [0, Math.max(summary.step_ns, 1)];
    this.highest = Math.max(...summary.devices.map(device => device.peak), 1);
    const upTo = $("up-to-limits");
    this.take();
    upTo.checked = Math.max(...summary.devices.map(device => device.limit)) <= (this.hasRows ? 2 : 4) * this.highest;
    upTo.addEventListener("change", () => draw(this.chart));
    this.raster = new Raster();
    this.chart = chart("memory", this.height, width => this.hasRows ? this.rowsOption(width) : this.option(width));
    const pixels = this.chart.getZr();
    pixels.on("mousemove", event => this.hasRows && this.hover(event));
    pixels.on("globalout", hideTip);
    peakTables(data);
  }

  // the devices to draw
  take() {
    this.devices = shownDevices();
    const size = this.devices.length;
    this.hasRows = size > MOST_LINES; // too low for limits far above
    this.row = size <= 8 ? 38 : size <= 16 ? 28 : 18;
  }

  get height() {
    return this.hasRows ? 80 + this.row * this.devices.length : 300;
  }

  // other devices
  show() {
    this.take();
    $("memory").style.height = `${this.height}px`;
    draw(this.chart);
    this.chart.resize(); // draws too, so not before
    peakTables(this.data);
  }

  // the largest value that is drawn
  get top() {
    return 1.04 * ($("up-to-limits").checked ? Math.max(this.highest, ...summary.devices.map(device => device.limit)) : this.highest);
  }

  rowsOption(width) {
    const left = leftOf(width), far = [...new Set(summary.devices.map(device => device.limit))].filter(limit => limit > this.top);
    const scale = far.length ? `, the limit${far.length > 1 ? "s" : ""} of ${far.slice(0, 3).map(bytes).join(", ")} above it` : "";
    return {
      title: { text: `height of a row: ${bytes(this.top)}${isNarrow(width) ? "" : scale}`, left, top: 0, textStyle: { color: css("--quiet"), fontSize: 12, fontWeight: "normal" } },
      grid: { left, right: 16, top: ROWS_TOP, height: this.row * this.devices.length },
      xAxis: { type: "value", min: this.view[0], max: this.view[1], splitNumber: isNarrow(width) ? 3 : 6, ...axisLook(),
        axisLabel: { ...axisText(), hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter: value => tick(value, this.view[1] - this.view[0]) } },
      yAxis: { type: "category", inverse: true, data: this.devices.map((_, index) => String(index)), ...axisLook(), axisTick: { show: false },
        splitLine: { show: true, lineStyle: { color: css("--line") } },
        axisLabel: { ...axisText(), color: css("--text"), interval: 0, fontSize: isNarrow(width) ? 11 : 12, lineHeight: 14,
          formatter: at => this.row >= 28 ? `${middle(summary.devices[this.devices[at]].name, isNarrow(width) ? 14 : 21)}\n${bytes(summary.devices[this.devices[at]].peak)}`
            : middle(summary.devices[this.devices[at]].name, isNarrow(width) ? 14 : 21) } },
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
    showTip(facts(middle(name, 60), [["at", time(ns)], ["holds", `${bytes(memoryBytes[at])}, ${percent(memoryBytes[at] / Math.max(limit, 1))} of ${bytes(limit)}`]], ""),
      event.event.clientX ?? event.event.zrX, event.event.clientY ?? event.event.zrY);
  }

  option(width) {
    const limits = new Map();
    this.devices.map(number => summary.devices[number]).forEach(device => limits.set(device.limit, [...(limits.get(device.limit) || []), middle(device.name, 24)]));
    const top = 1.08 * ($("up-to-limits").checked ? Math.max(this.highest, ...limits.keys()) : this.highest);
    const near = [...limits.keys()].filter(limit => limit <= top), far = [...limits.keys()].filter(limit => limit > top);
    const told = limit => `limit ${bytes(limit)} of ${limits.get(limit).length === this.devices.length ? "each device" : middle(limits.get(limit).join(", "), 60)}`;
    return {
      legend: { type: "scroll", top: 0, textStyle: { color: css("--text") }, pageTextStyle: axisText(),
        formatter: name => middle(name, 24) },
      title: far.length ? { text: middle(`↑ ${far.map(told).join(", ")}`, isNarrow(width) ? 36 : 120), left: leftOf(width), top: 26,
        textStyle: { color: css("--bad"), fontSize: 12, fontWeight: "normal" } } : undefined,
      grid: { left: leftOf(width), right: 16, top: 46, bottom: 30 },
      tooltip: { trigger: "axis", ...tipLook(), formatter: points => points.length ? [time(points[0].value[0]),
        ...points.map(point => `${middle(point.seriesName, 30)}  ${bytes(point.value[1])}`)].join("\n") : "" },
      xAxis: { type: "value", min: this.view[0], max: this.view[1], splitNumber: isNarrow(width) ? 3 : 6, ...axisLook(),
        axisLabel: { ...axisText(), hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter: value => tick(value, this.view[1] - this.view[0]) } },
      yAxis: { type: "value", min: 0, max: top, interval: niceBytes(top), ...axisLook(),
        axisLabel: { ...axisText(), showMaxLabel: false, formatter: value => value ? bytes(value) : "0" } },
      series: this.devices.map((number, place) => ({
        name: summary.devices[number].name, type: "line", step: "end", symbol: "none", silent: true, sampling: "max",
        lineStyle: { width: 1.6, type: ["solid", "dashed", "dotted"][Math.floor(number / 7) % 3] },
        color: lineColour(number), data: this.points(number),
        markLine: place ? undefined : { silent: true, symbol: "none", lineStyle: { color: css("--bad"), type: "dashed", width: 1.5 },
          label: { position: "insideStartTop", color: css("--bad"), formatter: item => item.name },
          data: near.map(limit => ({ yAxis: limit, name: told(limit) })) },
      })),
    };
  }

  points(device) {
    const { memoryTimes, memoryBytes, memoryOffsets } = this.data;
    const made = [];
    for (let at = memoryOffsets[device]; at < memoryOffsets[device + 1]; at++) made.push([memoryTimes[at], memoryBytes[at]]);
    made.push([summary.step_ns, memoryBytes[memoryOffsets[device + 1] - 1]]);
    return made;
  }

  zoomTo(view) {
    this.view = view;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.chart.setOption({ xAxis: { min: view[0], max: view[1] } }), 120);
  }
}

// a distance of ticks that is a power of two of bytes
const niceBytes = top => 2 ** Math.ceil(Math.log2(top / 5));

// what memory is for, in colours of the palette
const PARTS = { parameters: 0, "optimizer state": 1, gradients: 3, "gathered parameters": 4, activations: 2, "recomputed activations": 6, "chunks of exchanges": 5 };
const partColour = part => PARTS[part] === undefined ? OTHER : OKABE_ITO[PARTS[part]];

function peakTables(data) {
  const devices = shownDevices().map(number => summary.devices[number]);
  const parts = Object.keys(devices[0]?.parts ?? {}).filter(part => devices.some(device => device.parts[part]));
  const headings = [{ text: "device" }, { text: "kind" }, { text: "ops", number: true }, { text: "busy", number: true },
    { text: "peak", number: true }, { text: "limit", number: true }, { text: "full", number: true }, { text: "at", number: true }];
  const rows = devices.map(device => ({ cells: [middle(device.name, 40), middle(device.kind, 40), device.ops.toLocaleString("en"), percent(device.busy),
    bytes(device.peak), bytes(device.limit), percent(device.peak / Math.max(device.limit, 1)), time(device.peak_at)] }));
  const divided = devices.map(device => ({ cells: [middle(device.name, 40), partsBar(device, parts), ...parts.map(part => bytes(device.parts[part]))] }));
  const details = devices.filter(device => device.alive.length).map(device => {
    const listed = table([{ text: "output of", name: true }, { text: "bytes", number: true }, { text: "from", number: true }, { text: "until", number: true }, { text: "" }],
      device.alive.map(item => ({ cells: [element("span", { class: "clip" }, middle(nameOf(data, item.op), 400)), bytes(item.bytes), time(item.from),
        item.until === null ? "the end" : time(item.until), item.copy ? "copy" : ""] })));
    const more = device.alive_more ? element("p", { class: "quiet" }, `and ${count(device.alive_more, "smaller one")}`) : "";
    return element("details", {}, element("summary", {}, `What ${middle(device.name, 60)} holds at its peak, ${bytes(device.peak)}`), listed, more);
  });
  const all = details.length > MOST_LINES ? [element("details", {}, element("summary", {}, "What each device holds at its peak"), ...details)] : details;
  const named = element("div", { class: "legend" });
  legend(named, parts.map(part => ({ name: part, colour: partColour(part) })));
  $("peaks").replaceChildren(table(headings, rows), element("h3", {}, "At the peaks"), named,
    table([{ text: "device" }, { text: "" }, ...parts.map(part => ({ text: part, number: true }))], divided), ...all);
}

// the parts of a peak side by side
function partsBar(device, parts) {
  const split = element("div", { class: "split peak", role: "img", "aria-label": parts.map(part => `${part} ${bytes(device.parts[part])}`).join(", ") });
  for (const part of parts) {
    const piece = element("i", { title: `${part} ${bytes(device.parts[part])}` });
    piece.style.background = partColour(part);
    piece.style.width = `${100 * device.parts[part] / Math.max(device.peak, 1)}%`;
    split.append(piece);
  }
  return split;
}
