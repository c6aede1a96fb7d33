import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { baseId, matchesSearch, isOfKind, kindsOf, sortRank, stateText } from "./model-properties";
import { href } from "./routes";
import { useUnlisted } from "./session";
import type { Model } from "./types";

const MAX_OPTIONS = 60; // a search finds the rest
const MAX_RECENT = 5;
const FAILED = "Could not be loaded: the page of the model says why";
const STORAGE_KEY = "sie.recent"; // names of models, which are no secret

/** Return the names of the models that the user used last. */
export function readRecent(): string[] {
  try {
    const names: unknown = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "[]");
    return Array.isArray(names) ? names.filter((name) => typeof name === "string") : [];
  } catch {
    return []; // the browser stores nothing
  }
}

/** Store the names of models that the user has used, before the earlier ones. */
export function storeRecent(names: string[]): void {
  try {
    localStorage.setItem(STORAGE_KEY, JSON.stringify([...new Set([...names, ...readRecent()])].slice(0, MAX_RECENT)));
  } catch {
    // the browser stores nothing
  }
}

interface Props {
  id: string;
  label: string;
  models: Model[];
  value: string;
  onChange: (id: string) => void;
  /** The text of the option for no model, if there is such an option. */
  none?: string;
  /** The model whose profiles come first. */
  comparedModel?: Model | undefined;
  /** Search the catalogue on the server, of which `models` may be a part. */
  onFind: (text: string) => void;
}

/** A button that opens a list of models with a search. */
export function Picker(props: Props) {
  const { id, label, models, value, none } = props;
  const [isOpen, setOpen] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const selected = models.find((model) => model.id === value);
  const close = () => {
    setOpen(false);
    button.current?.focus();
  };
  return (
    <div
      class="picker"
      onFocusOut={(event) => {
        const target = event.relatedTarget;
        if (target instanceof Node && !event.currentTarget.contains(target)) setOpen(false);
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
        {selected && <span class={`state ${selected.state}`}>{stateText(selected)}</span>}
      </button>
      {isOpen && (
        <Options
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

/** The search, the choice of a kind, and the options in groups. */
function Options({ id, label, models, value, onChange, none, comparedModel, onFind }: Props) {
  const [text, setText] = useState("");
  const [kind, setKind] = useState("");
  const [position, setPosition] = useState(0);
  const unlisted = useUnlisted();
  const list = useRef<HTMLDivElement>(null);
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => {
    search.current?.focus();
    return () => onFind("");
  }, []);
  const kinds = useMemo(() => kindsOf(models), [models]);
  const { groups, hiddenCount } = useMemo(() => {
    const recent = readRecent();
    const matching = models.filter((model) => isOfKind(model, kind) && matchesSearch(model, text.trim()));
    const group = (model: Model): string =>
      comparedModel && model.id !== comparedModel.id && baseId(model) === baseId(comparedModel) ? `Profiles of ${baseId(comparedModel)}`
      : recent.includes(model.id) ? "Recently used"
      : model.state === "failed" ? FAILED
      : sortRank(model) < 2 ? "Loaded"
      : model.on_disk ? "On disk: loaded by the first request"
      : "To download by the first request";
    const order = [comparedModel ? `Profiles of ${baseId(comparedModel)}` : "", "Recently used", "Loaded", "On disk: loaded by the first request", "To download by the first request", FAILED];
    const listed = matching.map((model) => ({ model, name: group(model) })).sort((first, second) => order.indexOf(first.name) - order.indexOf(second.name)).slice(0, MAX_OPTIONS);
    return { groups: order.map((name) => ({ name, models: listed.filter((entry) => entry.name === name).map(({ model }) => model) })).filter((group) => group.models.length), hiddenCount: matching.length - listed.length };
  }, [models, kind, text, comparedModel]);
  const options = [...(none ? [""] : []), ...groups.flatMap((group) => group.models.map((model) => model.id))];
  const active = Math.min(position, options.length - 1);
  const optionId = (index: number) => `${id}-option-${index}`;
  useEffect(() => list.current?.querySelector("[data-active]")?.scrollIntoView({ block: "nearest" }), [active]);

  function onKey(event: KeyboardEvent) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const option = options[active];
    if (step) setPosition(Math.max(0, Math.min(options.length - 1, active + step)));
    else if (event.key === "Enter" && option !== undefined) onChange(option);
    else return;
    event.preventDefault();
  }
  const option = (name: string, content: preact.ComponentChildren) => {
    const index = options.indexOf(name);
    return (
      <div role="option" id={optionId(index)} class="option" data-model={name} data-active={index === active || undefined} aria-selected={name === value} onMouseDown={(event) => event.preventDefault()} onClick={() => onChange(name)}>
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
            setPosition(0);
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
      {(text.trim() ? hiddenCount : hiddenCount + unlisted) > 0 && <p class="dim">{text.trim() ? "More models match: type another word." : `${hiddenCount + unlisted} more: type a part of a name, a task or a language.`}</p>}
    </div>
  );
}
