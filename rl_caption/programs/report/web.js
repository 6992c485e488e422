"use strict";
(() => {
  const limits = JSON.parse(document.body.dataset.limits);
  const form = document.forms[0];
  const gallery = document.getElementById("gallery");
  const count = document.getElementById("count");
  const clear = document.getElementById("clear");
  const blueprint = document.querySelector("template").content.firstElementChild;
  let cards = [];
  let note = "";
  let queue = Promise.resolve();

  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const shown = (value) => String(Number(value.toPrecision(4))).replace("-", "\u2212");
  const chosen = (name) => [...form.querySelectorAll(`[name=${name}]:checked`)].map((box) => box.value);
  const words = (text) => text.split(/([\p{L}\p{N}_]+)/u);

  const report = () => {
    const done = cards.filter((card) => card.done).length;
    const failed = cards.filter((card) => card.done && card.failed).length;
    const errors = failed ? `${failed} of them could not be captioned. ` : "";
    count.textContent = (cards.length ? `${done} of ${cards.length} photos done. ` : "No photo yet. ") + errors + note;
    clear.hidden = !cards.length;
  };

  // A caption in which words that the first captioner did not say are marked.
  const marked = (caption, first) => {
    const known = new Set(words(first.toLowerCase()));
    return words(caption).map((piece, index) =>
      element(index % 2 && !known.has(piece.toLowerCase()) ? "mark" : "span", piece));
  };

  const score = (judge, value, before) => {
    const line = element("span", `${judge} `);
    line.append(element("b", shown(value)));
    if (Math.abs(value - before) > 0.0005) {
      const up = value > before;
      line.append(" ", element("span", `${up ? "\u25b2" : "\u25bc"} ${shown(Math.abs(value - before))}`, up ? "up" : "down"));
    }
    return line;
  };

  const draw = (list, captions) => {
    const first = captions[0];
    list.replaceChildren(...captions.flatMap(({ model, caption, scores }) => {
      const text = element("span", "");
      text.append(...(caption ? marked(caption, first.caption) : [element("i", "(empty)")]));
      const small = element("small", "");
      small.append(...Object.entries(scores).map(([judge, value]) => score(judge, value, first.scores[judge])));
      const line = element("dd", "");
      line.append(text, small);
      return [element("dt", model), line];
    }));
  };

  const complain = (list, message) => {
    const box = element("dd", "", "verdict alarm");
    box.append(element("p", message));
    list.replaceChildren(box);
  };

  const content = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });

  const ask = async ({ file, references }, models, judges) => {
    if (!models.length) throw new Error("Choose a captioner.");
    if (file.size > limits.megabytes * 2 ** 20) {
      throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB: expected at most ${limits.megabytes}`);
    }
    const body = JSON.stringify({ name: file.name, image: await content(file), models, judges, references: references.value.split("\n") });
    let answer;
    try {
      answer = await fetch("captions", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    } catch {
      throw new Error(`No answer for ${file.name}: the terminal of the server says why`);
    }
    const { captions, error } = await answer.json();
    if (error) throw new Error(error);
    return captions;
  };

  // One photo at a time. What was asked for again, or removed, since it came into the queue is left out.
  const caption = (card) => {
    card.done = false;
    const turn = (card.turn = {});
    queue = queue.then(async () => {
      if (card.turn !== turn) return;
      try {
        draw(card.list, await ask(card, chosen("models"), chosen("judges")));
        card.failed = false;
      } catch (error) {
        card.failed = true;
        complain(card.list, error.message);
      }
      card.done = card.turn === turn;
      report();
    });
  };

  const add = (files) => {
    const room = limits.images - cards.length;
    const taken = [...files].slice(0, Math.max(room, 0));
    note = files.length > taken.length ? `${files.length - taken.length} more were left out: at most ${limits.images} at a time.` : "";
    for (const file of taken) {
      const article = blueprint.cloneNode(true);
      const [image, heading, list, references, again] = ["img", "h4", "dl", "textarea", "button"].map((name) => article.querySelector(name));
      const card = { file, list, references };
      image.src = URL.createObjectURL(file);
      image.alt = `Photo ${file.name}`;
      heading.textContent = file.name;
      list.append(element("dt", "waiting"));
      again.addEventListener("click", () => { caption(card); report(); });
      gallery.append(article);
      cards.push(card);
      caption(card);
    }
    report();
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ({ target }) => {
    if (target.type !== "file") cards.forEach(caption);
    else {
      const isFolder = target.name === "folder";
      add([...target.files].filter((file) => !isFolder || file.type.startsWith("image/")));
      target.value = "";
    }
    report();
  });
  clear.addEventListener("click", () => {
    for (const card of cards) card.turn = null;
    for (const image of gallery.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    cards = [];
    note = "";
    gallery.replaceChildren();
    report();
    form.elements.files.focus();
  });
  const over = (event, isOver) => {
    event.preventDefault();
    document.body.classList.toggle("over", isOver);
  };
  document.addEventListener("dragover", (event) => over(event, true));
  document.addEventListener("dragleave", (event) => over(event, false));
  document.addEventListener("drop", (event) => {
    over(event, false);
    add(event.dataTransfer.files);
  });
})();
