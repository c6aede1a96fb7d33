import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { baseId, matchesSearch, isOfKind, kindsOf, sortRank, stateText } from "./model-properties";
import { href } from "./routes";
import { useUnread } from "./session";
import type { Model } from "./types";

const SHOWN = 60; // options; a search finds the rest
const RECENT = 5;
const FAILED = "Could not be loaded: the page of the model says why";
const STORED = "sie.recent"; // names of models, which are no secret

/** The names of the models that were used last. */
export function recent(): string[] {
  try {
    const names: unknown = JSON.parse(localStorage.getItem(STORED) ?? "[]");
    return Array.isArray(names) ? names.filter((name) => typeof name === "string") : [];
  } catch {
    return []; // a browser that stores nothing
  }
}

/** Note that these models were used, the newest first. */
export function noteUse(names: string[]): void {
  try {
    localStorage.setItem(STORED, JSON.stringify([...new Set([...names, ...recent()])].slice(0, RECENT)));
  } catch {
    // a browser that stores nothing
  }
}

interface Props {
  id: string;
  label: string;
  models: Model[];
  value: string;
  onChange: (id: string) => void;
  /** The choice of no model, if there is one. */
  none?: string;
  /** The model whose profiles come first. */
  near?: Model | undefined;
  /** Called with what was typed, for a catalogue of which only a part is read. */
  onFind: (text: string) => void;
}

/** A model, chosen from a list that is searched. */
export function Picker(props: Props) {
  const { id, label, models, value, none } = props;
  const [isOpen, setOpen] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const chosen = models.find((model) => model.id === value);
  const close = () => {
    setOpen(false);
    button.current?.focus();
  };
  return (
    <div
      class="picker"
      onFocusOut={(event) => {
        const to = event.relatedTarget;
        if (to instanceof Node && !event.currentTarget.contains(to)) setOpen(false);
      }}
      onKeyDown={(event) => {
        if (event.key !== "Escape" || !isOpen) return;
        event.stopPropagation();
        close();
      }}
    >
      <span id={`${id}-label`}>{label}</span>
      <button type="button" id={id} ref={button} value={value} aria-haspopup="listbox" aria-expanded={isOpen} aria-labelledby={`${id}-label ${id}`} onClick={() => setOpen(!isOpen)}>
        <span class="chosen">{value || none || "no model"}</span>
        {chosen && <span class={`state ${chosen.state}`}>{stateText(chosen)}</span>}
      </button>
      {isOpen && (
        <Choices
          {...props}
          onChange={(next) => {
            props.onChange(next);
            close();
          }}
        />
      )}
    </div>
  );
}

function Choices({ id, label, models, value, onChange, none, near, onFind }: Props) {
  const [text, setText] = useState("");
  const [kind, setKind] = useState("");
  const [at, setAt] = useState(0);
  const unread = useUnread();
  const list = useRef<HTMLDivElement>(null);
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => {
    search.current?.focus();
    return () => onFind("");
  }, []);
  const kinds = useMemo(() => kindsOf(models), [models]);
  const { groups, rest } = useMemo(() => {
    const used = recent();
    const fitting = models.filter((model) => isOfKind(model, kind) && matchesSearch(model, text.trim()));
    const group = (model: Model): string =>
      near && model.id !== near.id && baseId(model) === baseId(near) ? `Profiles of ${baseId(near)}`
      : used.includes(model.id) ? "Recently used"
      : model.state === "failed" ? FAILED
      : sortRank(model) < 2 ? "Loaded"
      : model.on_disk ? "On this disk: loaded by the first request"
      : "To download by the first request";
    const order = [near ? `Profiles of ${baseId(near)}` : "", "Recently used", "Loaded", "On this disk: loaded by the first request", "To download by the first request", FAILED];
    const shown = fitting.map((model) => ({ model, name: group(model) })).sort((first, second) => order.indexOf(first.name) - order.indexOf(second.name)).slice(0, SHOWN);
    return { groups: order.map((name) => ({ name, models: shown.filter((entry) => entry.name === name).map(({ model }) => model) })).filter((group) => group.models.length), rest: fitting.length - shown.length };
  }, [models, kind, text, near]);
  const options = [...(none ? [""] : []), ...groups.flatMap((group) => group.models.map((model) => model.id))];
  const active = Math.min(at, options.length - 1);
  const optionId = (place: number) => `${id}-option-${place}`;
  useEffect(() => list.current?.querySelector("[data-active]")?.scrollIntoView({ block: "nearest" }), [active]);

  function onKey(event: KeyboardEvent) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const option = options[active];
    if (step) setAt(Math.max(0, Math.min(options.length - 1, active + step)));
    else if (event.key === "Enter" && option !== undefined) onChange(option);
    else return;
    event.preventDefault();
  }
  const option = (name: string, content: preact.ComponentChildren) => {
    const place = options.indexOf(name);
    return (
      <div role="option" id={optionId(place)} class="option" data-model={name} data-active={place === active || undefined} aria-selected={name === value} onMouseDown={(event) => event.preventDefault()} onClick={() => onChange(name)}>
        {content}
      </div>
    );
  };
  return (
    <div class="popover">
      <div class="row">
        <input
          type="text" role="combobox" aria-label={`Search: ${label}`} aria-expanded="true" aria-controls={`${id}-list`} aria-autocomplete="list"
          aria-activedescendant={active >= 0 ? optionId(active) : undefined} placeholder="Search by name, task, language" autocomplete="off" spellcheck={false}
          ref={search} value={text} onKeyDown={onKey}
          onInput={(event) => {
            setText(event.currentTarget.value);
            setAt(0);
            onFind(event.currentTarget.value);
          }}
        />
        {kinds.length > 1 && (
          <select aria-label="Kind of model" value={kind} onChange={(event) => setKind(event.currentTarget.value)}>
            <option value="">All kinds</option>
            {kinds.map((name) => <option value={name}>{name}</option>)}
          </select>
        )}
      </div>
      <div class="options" role="listbox" id={`${id}-list`} aria-label={label} ref={list}>
        {none && option("", none)}
        {groups.map((group) => (
          <div role="group" aria-label={group.name}>
            <p class="group" aria-hidden="true">{group.name}</p>
            {group.models.map((model) => option(model.id, (
              <>
                <span class="name">{model.id}</span>
                <span class={`state ${model.state}`}>{stateText(model)}</span>
                {model.description && <small>{model.description}</small>}
              </>
            )))}
          </div>
        ))}
      </div>
      {!groups.length && <p class="dim">{`No model for this task has "${text}" in its name or description. `}<a href={href("models", [], { add: text.trim() })}>Add it</a></p>}
      {(text.trim() ? rest : rest + unread) > 0 && <p class="dim">{text.trim() ? "More fit: type another word." : `${rest + unread} more: type a part of a name, a task or a language.`}</p>}
    </div>
  );
}
