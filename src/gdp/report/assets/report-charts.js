// Cards, placers, progress of the search, what-ifs and measured times: whatever of them is known.
const NOT_FITTING = "repeating-linear-gradient(45deg, var(--bad) 0 2px, var(--line) 2px 6px)";
const NOT_OK = { infeasible: "does not fit", failed: "no placement", skipped: "no time" };

function cards() {
  const gap = summary.bound_ns ? percentAbove(Math.max(summary.step_ns / summary.bound_ns - 1, 0)) : "unknown";
  const stream = summary.throughput;
  const items = stream ? [[time(stream.time_per_batch_ns), `per batch, ${digits(stream.batches_per_second, 4)} batches per second; a batch takes up to ${time(stream.latency_ns)}`]] : [
    [time(summary.step_ns), ["step time", summary.step_range_ns?.map(ns => time(ns, 3)).join(" to ")].filter(Boolean).join(", ")],
    ...summary.against.map(([ratio, text]) => ratio === null ? ["—", text] : [`${digits(ratio, 3)}×`, `speed-up over ${middle(text, 80)}`]),
    [gap, summary.bound_ns ? `at most, above the lower bound of ${time(summary.bound_ns)} for this graph on these devices` : "lower bound 0: the distance to the optimum"],
  ];
  const bound = summary.layout?.bound_ns;
  if (bound) items.push([percentAbove(Math.max(summary.step_ns / bound - 1, 0)), `at most, above the lower bound of ${time(bound)} for any layout of this batch on these devices`]);
  $("cards").replaceChildren(...items.map(([value, text]) => element("div", { class: "card" }, element("b", {}, value), element("span", {}, text))));
}

// a step time, with ~ where it is an estimate, a bar with a line at `mark`, and the ratio to the plan's step time
const timeCells = (ns, longest, colour, mark, isEstimate = false, none = "–") => ns === null ? [none, "", "–"]
  : [`${isEstimate ? "~" : ""}${time(ns)}`, bar(ns / longest, colour, mark && mark / longest), (ns / Math.max(summary.step_ns, 1)).toFixed(3)];

function placers() {
  const rows = summary.placers;
  if (isAbsent("placers-part", rows.length < 2)) return;
  const longest = Math.max(...rows.map(row => row.ns ?? 0), 1);
  const shown = [...rows].sort((a, b) => (a.status !== "ok") - (b.status !== "ok") || (a.ns ?? Infinity) - (b.ns ?? Infinity));
  const colour = row => row.status !== "ok" ? NOT_FITTING : row.plan ? "var(--plan)" : "var(--bar)";
  $("placers-table").replaceChildren(table(["placer", ">step time", "", ">of the plan's", ">seconds"],
    shown.map(row => ({ chosen: row.plan, cells: [middle(row.name, 40), row.ns ? time(row.ns) : "–",
      element("div", { class: "outcome" }, row.ns ? bar(row.ns / longest, colour(row), summary.bound_ns / longest) : "", NOT_OK[row.status] ?? (row.status === "ok" ? "" : row.status)),
      row.ns ? (row.ns / Math.max(summary.step_ns, 1)).toFixed(3) : "–", row.seconds === null ? "–" : row.seconds.toFixed(2)] }))));
  if (summary.bound_ns) $("placers-table").append(element("p", { class: "quiet" }, `The line in each bar is the lower bound, ${time(summary.bound_ns)}.`));
}

function progress() {
  const points = summary.progress.filter(point => point[2]);
  if (isAbsent("progress-part", points.length < 2)) return;
  const last = Math.max(summary.seconds ?? 0, points[points.length - 1][0]);
  const line = [...points.map(([seconds, ns]) => [seconds, ns]), [last, points[points.length - 1][1]]];
  const highest = Math.max(...line.map(point => point[1])), lowest = Math.min(summary.bound_ns || Infinity, ...line.map(point => point[1]));
  const pad = (highest - lowest || highest) * 0.08;
  chart("progress", Math.max(70 + 28 * summary.placers.length, 220), () => ({
    grid: { left: 76, right: 24, top: 26, bottom: 40 },
    xAxis: { type: "value", min: 0, max: last || 1, ...axisLook(), axisLabel: { ...axisText(), hideOverlap: true, showMaxLabel: false, formatter: value => `${digits(value, 2)} s` } },
    yAxis: { type: "value", min: Math.max(lowest - pad, 0), max: highest + pad, splitNumber: 4, ...axisLook(),
      axisLabel: { ...axisText(), showMinLabel: false, showMaxLabel: false, formatter: value => tick(value, highest) } },
    tooltip: { trigger: "axis", ...tipLook(), formatter: found => found.length ? `${digits(found[0].value[0], 3)} s\n${time(found[0].value[1])}` : "" },
    series: [{ type: "line", step: "end", symbolSize: 5, color: css("--plan"), data: line, name: "best step time",
      markLine: summary.bound_ns ? { silent: true, symbol: "none", lineStyle: { color: css("--bad"), type: "dashed" },
        label: { position: "insideStartTop", color: css("--bad"), formatter: "bound" }, data: [{ yAxis: summary.bound_ns }] } : undefined }],
  }));
}

function advice() {
  const place = $("advice");
  if (!summary.advice) {
    place.append(element("p", { class: "quiet" }, summary.reasons.length ? "Other machines are tried for plans that fit."
      : "Not asked. gdp place tries other machines after its search (a device less, a device more, faster links, more memory) and shows them here, " +
        "unless --no-advice or a layout is given; a plan file alone does not hold them."));
    return;
  }
  const { what_ifs: whatIfs, sentences } = summary.advice;
  const longest = Math.max(summary.step_ns, ...whatIfs.map(item => item.step_time_ns ?? 0), 1);
  const rows = whatIfs.map(item => ({ cells: [element("div", {}, item.change, element("div", { class: "quiet" }, middle([item.detail, item.layout].filter(Boolean).join(": "), 120))),
    ...timeCells(item.step_time_ns, longest, "var(--bar)", summary.step_ns, item.is_estimate, "does not fit")] }));
  if (rows.length) place.append(table(["change", ">step time", "", ">of the plan's"], rows));
  place.append(...sentences.map(sentence => element("p", {}, sentence)));
  if (!rows.length && !sentences.length) place.append(element("p", { class: "quiet" }, "No change of the machine was tried."));
}

function measured() {
  const run = summary.run;
  if (isAbsent("run-part", !run)) return;
  const place = $("run");
  const spread = arm => [time(arm.step_time_ns), arm.step_time_quartiles_ns.map(ns => time(ns)).join(" to ")];
  const error = percent(run.predicted_step_time_ns / Math.max(run.step_time_ns, 1) - 1).replace(/^(?=[^-])/, "+");
  const rows = [{ chosen: true, cells: ["plan", ...spread(run), time(run.predicted_step_time_ns), error] }];
  if (run.one_device) rows.push({ cells: [`all on ${middle(run.one_device.device, 60)}`, ...spread(run.one_device), "–", "–"] });
  place.append(element("p", {}, `Medians of ${count(run.steps, "step")}; results ${run.equal ? "agree with" : "differ from"} ${middle(run.reference, 120)}.`),
    table(["", ">median", ">quartiles", ">predicted", ">error"], rows));
  const found = run.prediction;
  if (!found) return;
  const rest = [">predicted", ">measured"];
  place.append(element("h3", {}, "Devices, busy"), table(["device", ">ops", ...rest, ">waiting"],
    found.devices.map(row => ({ cells: [middle(row.name, 60), row.num_ops, time(row.predicted_busy_ns), time(row.busy_ns), time(row.wait_ns)] }))));
  if (found.transfers.length) place.append(element("h3", {}, "Transfers, medians"), table(["way", ">tensors", ...rest],
    found.transfers.map(row => ({ cells: [`${middle(row.from, 60)} → ${middle(row.to, 60)}`, row.num_tensors, time(row.predicted_ns), time(row.measured_ns)] }))));
  for (const [title, listed] of [["Kinds of ops that explain most of the error", found.kinds], ["Ops that do", found.ops]]) {
    place.append(element("h3", {}, title), table(["<", ">ops", ...rest],
      listed.map(row => ({ cells: [element("span", { class: "clip" }, middle(row.name, 300)), row.num_ops, time(row.predicted_ns), time(row.measured_ns)] }))));
  }
}
