"use strict";

// Elements, numbers and text. Everything reaches the page as text nodes or attributes, never as markup: prompts and
// tokens come from anywhere.

const SVG = "http://www.w3.org/2000/svg";
const NONE = "–";

function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// Attributes that are null, undefined or false are left out; functions become listeners of the event `key`.
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return node;
}

function fixed(value, digits = 2) {
  return typeof value === "number" ? value.toFixed(digits) : NONE;
}

function signed(value, digits = 2) {
  return typeof value === "number" ? (value > 0 ? "+" : "") + value.toFixed(digits) : NONE;
}

function percent(value, digits = 0) {
  return typeof value === "number" ? (100 * value).toFixed(digits) + " %" : NONE;
}

function span(interval, digits = 2) {
  return Array.isArray(interval) ? interval.map((end) => end.toFixed(digits)).join(" to ") : NONE;
}

// A probability with two significant digits, so that small ones do not all read "0 %".
function chance(p) {
  const hundred = 100 * p;
  if (hundred >= 9.95) return hundred.toFixed(0) + " %";
  return hundred >= 0.095 ? hundred.toFixed(1) + " %" : "<0.1 %";
}

// White space, control and formatting characters made visible: a token shows what it is.
function visible(text) {
  return text
    .replace(/ /g, "␣")
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\p{C}\p{Z}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function shorten(text, limit) {
  const characters = [...text];
  return characters.length > limit ? characters.slice(0, limit - 1).join("") + "…" : text;
}

function last(values) {
  return values[values.length - 1];
}

function unique(values) {
  return [...new Set(values)];
}

// Draws into a box at its real width, and again when that changes, so that text keeps its size on a phone.
function responsive(draw, className = "plot") {
  const box = el("div", { class: className });
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) {
      width = now;
      box.replaceChildren(draw(width));
    }
  }).observe(box);
  return box;
}

function figure(title, body, note = null) {
  return el(
    "figure",
    {},
    el("figcaption", {}, el("strong", {}, title), note ? el("span", {}, " " + note) : null),
    body,
  );
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...children);
}

// A labelled <select>; `options` are [value, text] pairs.
function choice(id, label, options, selected, onchange) {
  const items = options.map(([value, text]) => el("option", { value, selected: value === selected }, text));
  const select = el("select", { id, change: (event) => onchange(event.target.value) }, items);
  return el("label", { class: "choice", for: id }, el("span", {}, label), select);
}

// One tooltip for everything that carries data-tip, on hover and on focus.
function installTips() {
  const tip = document.getElementById("tip");
  const hide = () => (tip.hidden = true);
  const show = (event) => {
    const owner = event.target.closest?.("[data-tip]");
    if (!owner) return hide();
    tip.textContent = owner.getAttribute("data-tip");
    tip.hidden = false;
    placeTip(tip, owner.getBoundingClientRect());
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

function placeTip(tip, box) {
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = Math.max(8, Math.min(room, box.left + box.width / 2 - tip.offsetWidth / 2)) + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 8) + "px";
}
