// What is searched for, in any notation: words, of which each must fit a value's name, dtype or shape.
//
//   layers.0.weight  layers/0/weight  layers[0]["weight"]  model.*.weight  bf16  dtype:int8  4096x128  [4096, 128]  shape:4096

const SHORT = { bfloat16: "bf16", float16: "fp16 f16 half", float32: "fp32 f32", float64: "fp64 f64 double", int8: "i8", int16: "i16", int32: "i32", int64: "i64 long", uint8: "u8 byte" };
const WRAPPERS = /(^|\.)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)/g; // which programs write and checkpoints leave out
const SIZES = /^[[(]?((?:\d+|\*)(?:[x×,](?:\d+|\*))*),?[\])]?$/;

// The texts of a row in which words are looked for.
export function searched(row) {
  const dtype = row.dtype ?? "object";
  return { name: row.name.toLowerCase(), parts: dotted(`.${row.name}.`), dtype: `${dtype} ${SHORT[dtype] ?? ""}`, shape: row.shape ? `x${row.shape.join("x")}x` : "" };
}

function dotted(name) { // a["b"][0]/c is a.b.0.c
  return name.toLowerCase().replace(/["']/g, "").replace(/[[\]/.]+/g, ".");
}

// Whether a row fits, for the text of a search; null if it is empty.
export function matcher(text) {
  const words = text.toLowerCase().replace(/,\s+/g, ",").split(/\s+/).filter(Boolean).map(fitting);
  return words.length ? (row) => words.every((fits) => fits(row)) : null;
}

function fitting(word) {
  const [, field, wanted] = /^(shape|dtype|name):(.*)$/.exec(word) ?? [null, "", word];
  const sizes = SIZES.exec(wanted)?.[1].replace(/[×,]/g, "x");
  const inSizes = sizes ? new RegExp(`x${sizes.replaceAll("*", "\\d+")}x`) : null;
  const inName = [...new Set([dotted(wanted), dotted(wanted).replace(WRAPPERS, "")])].map(patternOf);
  const fits = {
    shape: (row) => !wanted || (inSizes !== null && inSizes.test(row.shape)),
    dtype: (row) => row.dtype.includes(wanted),
    name: (row) => (dotted(wanted) !== wanted && row.name.includes(wanted)) || inName.some((pattern) => pattern.test(row.parts)),
  };
  return fits[field] ?? ((row) => fits.name(row) || ` ${row.dtype}`.includes(` ${wanted}`) || (sizes?.includes("x") && fits.shape(row)));
}

// Numbers are whole: layers.1 is not layers.10.  With `*`, which is any text, all parts of a name are whole.
function patternOf(word) {
  const pattern = word.split("*").map((part) => part.replace(/[\\^$.+?()[\]{}|]/g, "\\$&")).join(".*");
  if (word.includes("*")) return new RegExp(`\\.${pattern.replace(/^\\\.|\\\.$/g, "")}\\.`, "s");
  return new RegExp(`${/^\d/.test(word) ? "(?<!\\d)" : ""}${pattern}${/\d$/.test(word) ? "(?!\\d)" : ""}`);
}
