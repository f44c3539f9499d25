// Makes elements. Text becomes text nodes only, so text from a model or a data set is never read as HTML.

/**
 * Returns an element with these properties: el("button", {type: "button", onclick: f, "aria-label": "Close"}, "x",
 * other).
 */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

/** Appends children, or lists of children. Strings and numbers become text. */
export function append(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces all content of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/** Returns a table with a caption for screen readers. `rows`: lists of texts or elements. */
export function table(caption, heads, rows) {
  return el("div", { class: "scrolls", tabindex: 0, role: "group", "aria-label": caption },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}

/** Returns a labelled control: a label element with its text before the control. */
export function labelled(text, control) {
  return el("label", {}, el("span", {}, text), control);
}

/** Returns a select element of [value, text] pairs. */
export function choice(options, value, onchange) {
  const made = el("select", { onchange: () => onchange(made.value) },
    options.map(([own, text]) => el("option", { value: own }, text)));
  made.value = String(value);
  return made;
}

/** Returns a function that calls `f` once, `ms` milliseconds after the last of several calls. */
export function later(ms, f) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...args), ms);
  };
}
