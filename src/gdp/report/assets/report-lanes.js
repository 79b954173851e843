// Rows of the timeline, and what is drawn of them: op by op where an op is a pixel wide, else one block a pixel.
const DIM = 16; // added to a colour's number: not among what is searched for

// [{name, isDevice, items, starts, ends, latest}]: items are numbers of ops or transfers, by start
function lanes(data) {
  const made = summary.devices.map((device, number) => {
    const items = data.order.subarray(data.orderOffsets[number], data.orderOffsets[number + 1]);
    return lane(device.name, true, items, data.start, data.finish);
  });
  data.lanes.forEach((name, number) => {
    const items = data.laneTransfers.subarray(data.laneOffsets[number], data.laneOffsets[number + 1]);
    made.push(lane(name, false, items, data.sentStart, data.sentEnd));
  });
  return made;
}

function lane(name, isDevice, items, from, until) {
  const starts = new Float64Array(items.length), ends = new Float64Array(items.length), latest = new Float64Array(items.length);
  let last = 0;
  for (let index = 0; index < items.length; index++) {
    starts[index] = from[items[index]];
    ends[index] = until[items[index]];
    latest[index] = last = Math.max(last, ends[index]);
  }
  return { name, isDevice, items, starts, ends, latest };
}

// What to draw from `low` to `high` ns: for each colour a list of (x, width, share of the height); x = offset + scale * ns.
function blocks(row, colourOf, low, high, offset, scale) {
  const drawn = new Map();
  const put = (colour, x, width, share) => {
    let list = drawn.get(colour);
    if (list === undefined) drawn.set(colour, list = []);
    const end = list.length;
    if (end && width <= 1 && list[end - 3] + list[end - 2] === x && Math.abs(list[end - 1] - share) < 0.15) list[end - 2] += width;
    else list.push(x, width, share);
  };
  const busy = new Float64Array(2 * DIM);
  let pixel = -1, total = 0;
  const flush = () => {
    if (pixel < 0) return;
    let most = 0;
    for (let colour = 1; colour < busy.length; colour++) if (busy[colour] > busy[most]) most = colour;
    put(most, pixel, 1, Math.min(1, Math.max(0.25, total)));
    busy.fill(0);
    total = 0;
    pixel = -1;
  };
  const { starts, ends, items } = row;
  const stop = above(starts, high);
  for (let index = above(row.latest, low); index < stop; index++) {
    const x = offset + scale * starts[index], width = scale * (ends[index] - starts[index]);
    const colour = colourOf(items[index]);
    if (width >= 1) {
      flush();
      put(colour, x, width, 1);
      continue;
    }
    const here = Math.floor(x);
    if (here !== pixel) {
      flush();
      pixel = here;
    }
    busy[colour] += width + 1e-9;
    total += width;
  }
  flush();
  return drawn;
}

// the index in `row.items` of what is at `ns`, at most `near` ns off; -1 if nothing is
function itemAt(row, ns, near) {
  let best = -1, distance = near;
  const stop = above(row.starts, ns + near);
  for (let index = above(row.latest, ns - near); index < stop; index++) {
    const off = Math.max(row.starts[index] - ns, ns - row.ends[index], 0);
    if (off < distance || (off === 0 && distance >= 0)) {
      best = index;
      distance = off;
      if (off === 0) break;
    }
  }
  return best;
}
