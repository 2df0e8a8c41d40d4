// The body of a function that returns what cannot be read: texts whose contrast with their ground is below
// arguments[0], those in cells of the grid among them, and texts of drawings that are cut or lie on each other.
const found = [];
const rgba = (colour) => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], ground) => [...[r, g, b].map((one, k) => one * a + ground[k] * (1 - a)), 1];
const linear = (one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const check = (what, ink, ground) => {
  const [dark, bright] = [light(over(ink, ground)), light(ground)].sort((a, b) => a - b);
  const contrast = (bright + 0.05) / (dark + 0.05);
  if (!(contrast >= arguments[0])) found.push(`${what}: ${contrast.toFixed(2)}`);
};

for (const e of document.querySelectorAll("body *")) {
  const text = [...e.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data.trim()).join("");
  if (!text || !e.checkVisibility() || e.closest("title, noscript, .unseen, .skip")) continue;
  const ink = rgba(getComputedStyle(e)[e.closest("svg") ? "fill" : "color"]);
  let ground = rgba(getComputedStyle(document.documentElement).getPropertyValue("--ground").trim());
  const chain = [];
  for (let one = e; one; one = one.parentElement) chain.unshift(getComputedStyle(one));
  for (const style of chain) {
    ground = over(rgba(style.backgroundColor), ground);
    ink[3] *= Number(style.opacity);
  }
  check(`${e.tagName} ${e.id} ${text.slice(0, 30)}`, ink, ground);
}

const variable = (name) => rgba(getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
for (const letter of "CRUNSTDL") check(`a cell of colour ${letter}`, variable("on"), variable(letter));
check("a cell of a dead rank", variable("on-dead"), variable("X"));
check("a cell of a rank that has not registered", variable("on"), variable("card"));

for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].filter((e) => e.textContent !== "✕").map((e) => [e.textContent, e.getBoundingClientRect()]);
  boxes.forEach(([text, box], place) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) found.push(`${text}: cut`);
    for (const [other, its] of boxes.slice(place + 1)) {
      const apart = box.right <= its.left || its.right <= box.left || box.bottom <= its.top + 3 || its.bottom <= box.top + 3;
      if (!apart) found.push(`${text}: on ${other}`);
    }
  });
}
return found;
