// Building and changing elements. What comes from outside is text here, and never markup.

/** An element with a class and children: elements, or strings. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Set the text where it is another: a screen reader is told of changes alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Let the children of `parent` stand for `items`, in their order: those that stay are kept, so that they can be watched.
 * `key` names an item, `make` builds an element for it, `fill` brings one up to date.
 */
export function keep(parent, items, key, make, fill) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const name = String(key(item));
    let child = before.get(name);
    if (child) before.delete(name);
    else {
      child = make(item);
      child.dataset.key = name;
    }
    fill(child, item);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  for (const gone of before.values()) gone.remove();
}
