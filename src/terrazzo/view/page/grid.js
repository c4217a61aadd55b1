// Who holds what: a tensor's cells and their holders, {shape, starts, holders}, as terrazzo.layout.Grid has them.

export function gridOf(shape, boxes) { // boxes: [holder, offsets, lengths]; null if they form no grid
  const held = boxes.filter(([, , lengths]) => !lengths.includes(0));
  if (!held.length) return shape.includes(0) ? { shape, starts: shape.map(() => []), holders: [] } : null;
  const starts = shape.map((_, dim) => [...new Set(held.map(([, offsets]) => offsets[dim]))].sort((a, b) => a - b));
  const places = starts.map((each) => new Map(each.map((start, place) => [start, place])));
  const cells = starts.reduce((product, each) => product * each.length, 1);
  if (starts.some((each) => each[0] !== 0) || cells > held.length) return null;
  const holders = Array.from({ length: cells }, () => []);
  for (const [holder, offsets, lengths] of held) {
    let cell = 0;
    for (let dim = 0; dim < shape.length; dim += 1) {
      const place = places[dim].get(offsets[dim]);
      if ((starts[dim][place + 1] ?? shape[dim]) !== offsets[dim] + lengths[dim]) return null;
      cell = cell * starts[dim].length + place;
    }
    holders[cell].push(holder);
  }
  return holders.some((each) => !each.length) ? null : { shape, starts, holders };
}

export function boxesOfSteps(shape, steps) { // of a tensor that is cut at multiples of steps
  let boxes = [[[], []]];
  shape.forEach((size, dim) => {
    const parts = [];
    for (let start = 0; start === 0 || start < size; start += steps[dim]) parts.push([start, Math.min(steps[dim], size - start)]);
    boxes = boxes.flatMap(([offsets, lengths]) => parts.map(([start, length]) => [[...offsets, start], [...lengths, length]]));
  });
  return boxes;
}

export function chunkSpan(size, parts, index) { // the rule of torch.chunk: every part but the last has ceil(size / parts)
  const step = Math.ceil(size / parts);
  const offset = Math.min(size, step * index);
  return [offset, Math.min(size, offset + step) - offset];
}

export function boxesOfMesh(shape, mesh, placements) { // for each rank of a mesh, row-major: [rank, offsets, lengths]
  const ranks = mesh.reduce((product, [, size]) => product * size, 1);
  const boxes = [];
  for (let rank = 0; rank < ranks; rank += 1) {
    const offsets = shape.map(() => 0);
    const lengths = [...shape];
    coordinateOf(rank, mesh).forEach((index, m) => {
      const dim = placements[m].dim;
      if (dim === undefined) return;
      const [offset, length] = chunkSpan(lengths[dim], mesh[m][1], index);
      offsets[dim] += offset;
      lengths[dim] = length;
    });
    boxes.push([rank, offsets, lengths]);
  }
  return boxes;
}

export function coordinateOf(position, mesh) {
  const coordinate = [];
  for (const [, size] of [...mesh].reverse()) {
    coordinate.unshift(position % size);
    position = Math.floor(position / size);
  }
  return coordinate;
}

const MOST_RANKS = 65536;

export function parseMesh(text) {
  const mesh = text.split(",").map((part, number) => {
    const match = /^\s*(?:([^=,]+?)\s*=\s*)?(\d{1,9})\s*$/.exec(part);
    if (!match || Number(match[2]) < 1) throw new Error(`"${part}" is no dim of a mesh: write dp=64,tp=8`);
    return [match[1] ?? String(number), Number(match[2])];
  });
  const ranks = mesh.reduce((product, [, size]) => product * size, 1);
  if (ranks > MOST_RANKS) throw new Error(`a mesh of ${ranks} ranks is too large to draw; up to ${MOST_RANKS} are drawn`);
  return mesh;
}

export function parsePlacements(text, dims, ndim) {
  const placements = text.split(",").map((part) => {
    const word = part.trim();
    const match = /^S(?:hard)?\((?:dim=)?(-?\d{1,4})\)$/.exec(word);
    if (match) {
      const dim = Number(match[1]) < 0 ? Number(match[1]) + ndim : Number(match[1]);
      if (dim < 0 || dim >= ndim) throw new Error(`${word}: this tensor has ${ndim} dims`);
      return { text: `S(${dim})`, dim };
    }
    if (/^(R|Replicate\(\))$/.test(word)) return { text: "R" };
    if (/^P(artial)?(\(\w*\))?$/.test(word)) return { text: word };
    throw new Error(`"${word}" is no placement: write S(dim), R or P`);
  });
  if (placements.length !== dims) throw new Error(`${placements.length} placements for a mesh of ${dims} dims`);
  return placements;
}
