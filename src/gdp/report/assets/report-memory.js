// Memory of each device over the step, with what it may hold, and what is alive at each peak.
class MemoryChart {
  constructor(data) {
    this.data = data;
    this.view = [0, Math.max(summary.step_ns, 1)];
    this.highest = Math.max(...summary.devices.map(device => device.peak), 1);
    const upTo = $("up-to-limits");
    upTo.checked = Math.max(...summary.devices.map(device => device.limit)) <= 4 * this.highest;
    upTo.addEventListener("change", () => draw(this.chart));
    this.chart = chart("memory", 300, width => this.option(width));
    peakTables();
  }

  option(width) {
    const limits = new Map();
    summary.devices.forEach(device => limits.set(device.limit, [...(limits.get(device.limit) || []), middle(device.name, 24)]));
    const top = 1.08 * ($("up-to-limits").checked ? Math.max(this.highest, ...limits.keys()) : this.highest);
    const near = [...limits.keys()].filter(limit => limit <= top), far = [...limits.keys()].filter(limit => limit > top);
    const told = limit => `limit ${bytes(limit)} of ${limits.get(limit).length === summary.devices.length ? "each device" : middle(limits.get(limit).join(", "), 60)}`;
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
      series: summary.devices.map((device, number) => ({
        name: device.name, type: "line", step: "end", symbol: "none", silent: true, sampling: "max",
        lineStyle: { width: 1.6, type: ["solid", "dashed", "dotted"][Math.floor(number / 7) % 3] },
        color: lineColour(number), data: this.points(number),
        markLine: number ? undefined : { silent: true, symbol: "none", lineStyle: { color: css("--bad"), type: "dashed", width: 1.5 },
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

function peakTables() {
  const headings = [{ text: "device" }, { text: "kind" }, { text: "ops", number: true }, { text: "busy", number: true },
    { text: "peak", number: true }, { text: "limit", number: true }, { text: "full", number: true }, { text: "at", number: true },
    { text: "parameters and state", number: true }, { text: "outputs alive", number: true }, { text: "results kept", number: true }, { text: "copies", number: true }];
  const rows = summary.devices.map(device => ({ cells: [middle(device.name, 40), middle(device.kind, 40), device.ops.toLocaleString("en"), percent(device.busy),
    bytes(device.peak), bytes(device.limit), percent(device.peak / Math.max(device.limit, 1)), time(device.peak_at),
    bytes(device.resident), bytes(device.passing), bytes(device.kept), bytes(device.copies)] }));
  const details = summary.devices.filter(device => device.alive.length).map(device => {
    const listed = table([{ text: "output of", name: true }, { text: "bytes", number: true }, { text: "from", number: true }, { text: "until", number: true }, { text: "" }],
      device.alive.map(item => ({ cells: [element("span", { class: "clip" }, middle(item.op, 400)), bytes(item.bytes), time(item.from),
        item.until === null ? "the end" : time(item.until), item.copy ? "copy" : ""] })));
    const more = device.alive_more ? element("p", { class: "quiet" }, `and ${count(device.alive_more, "smaller one")}`) : "";
    return element("details", {}, element("summary", {}, `What ${middle(device.name, 60)} holds at its peak, ${bytes(device.peak)}`), listed, more);
  });
  $("peaks").replaceChildren(table(headings, rows), ...details);
}
