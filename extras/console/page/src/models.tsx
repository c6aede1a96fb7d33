import { useEffect, useMemo, useState } from "preact/hooks";
import { usePolling } from "./polling";
import { ModelDetail } from "./model-detail";
import { ModelAdd } from "./model-add";
import { baseId, matchesSearch, isOfKind, kindsOf, modelPath, sortRank, outputsText, parameterCount, stateText } from "./model-properties";
import { href, type Route } from "./routes";
import { Table } from "./table";
import type { Model } from "./types";
import { InlineCode } from "./inline-code";

const PAGE_SIZE = 16;
const TASKS = ["encode", "score", "extract"] as const;
const STATES = ["loaded", "loading", "failed", "on disk", "to download"];
const EVERY_MS = 2_000;
const FILTERS = { find: "", task: "", kind: "", state: "", page: "" };

interface Props {
  models: Model[];
  total: number;
  route: Route;
  onFind: (text: string) => void;
}

/** The list of models, or the page of the model whose id is in the route. */
export function Models(props: Props) {
  const id = props.route.parts.join("/");
  if (!id) return <ModelList {...props} />;
  const model = props.models.find((model) => model.id === id);
  return (
    <section>
      <p class="path"><a href={href("models")}>Models</a></p>
      {model ? <ModelDetail key={id} model={model} /> : <Unlisted key={id} id={id} />}
    </section>
  );
}

/** The page of a model that is not in `models`. */
function Unlisted({ id }: { id: string }) {
  const { value, error } = usePolling<Model>(modelPath(id), EVERY_MS);
  return (
    <>
      {error && <p class="bad" role="alert"><InlineCode text={error} />{error.startsWith("MODEL_NOT_FOUND") && <> <a href={href("models", [], { add: id })}>Add it</a></>}</p>}
      {value ? <ModelDetail model={value} /> : !error && <p class="dim" role="status">reading the model</p>}
    </>
  );
}

function ModelList({ models, total, route, onFind }: Props) {
  const [filters, setFilters] = useState(() => ({ ...FILTERS, ...Object.fromEntries(route.query) }));
  const { find, task, kind, state } = filters;
  useEffect(() => {
    onFind(find);
    return () => onFind("");
  }, []);
  /** Change the filters and the address. An effect would be too late: it could undo a step to the page of a model. */
  const filter = (change: Partial<typeof FILTERS>) => {
    const next = { ...filters, page: "", ...change };
    setFilters(next);
    history.replaceState(null, "", href("models", [], next)); // not a step in the history of the browser
    onFind(next.find);
  };
  const kinds = useMemo(() => kindsOf(models), [models]);
  const groups = useMemo(() => {
    const groups = new Map<string, Model[]>();
    for (const model of models) groups.set(baseId(model), [...(groups.get(baseId(model)) ?? []), model]);
    const fits = (model: Model): boolean =>
      matchesSearch(model, find.trim()) && (!task || model.tasks.some((name) => name === task)) && isOfKind(model, kind) && (!state || stateText(model).startsWith(state));
    const order = (group: Model[]): number => Math.min(...group.map(sortRank));
    return [...groups.values()].filter((group) => group.some(fits)).sort((first, second) => order(first) - order(second));
  }, [models, find, task, kind, state]);
  const pages = Math.max(1, Math.ceil(groups.length / PAGE_SIZE));
  const page = Math.min(pages, Math.max(1, Number(filters.page) || 1));
  const choice = (name: "task" | "kind" | "state", label: string, options: [string, string][]) => (
    <label>
      {label}
      <select id={`model-${name}`} value={filters[name]} onChange={(event) => filter({ [name]: event.currentTarget.value })}>
        <option value="">all</option>
        {options.map(([value, title]) => <option value={value}>{title}</option>)}
      </select>
    </label>
  );
  return (
    <section>
      <div class="row filters">
        <label class="grow">
          Search
          <input id="model-filter" type="search" value={find} placeholder="name, description, licence, language" onInput={(event) => filter({ find: event.currentTarget.value })} />
        </label>
        {choice("task", "Does", TASKS.map((name) => [name, name]))}
        {choice("kind", "Kind", kinds.map((name) => [name, name]))}
        {choice("state", "State", STATES.map((name) => [name, name]))}
      </div>
      <ModelAdd key={route.query.get("add")} models={models} initialName={route.query.get("add") ?? ""} />
      <p class="dim">{`${groups.length} ${groups.length === 1 ? "model" : "models"}${total > models.length && !task && !kind && !state ? `. ${total - models.length} more names, of models and profiles, are not listed: a search finds them` : ""}`}</p>
      {!groups.length && (
        <p>
          No model has all of this. Most that read several languages are described as multilingual, not by the names of the languages.
          {find.trim() && <>{" "}<a href={href("models", [], { add: find.trim() })}>{`Add ${find.trim()}`}</a></>}
        </p>
      )}
      {groups.length > 0 && (
        <Table label="Models" class="cards models" rows={{ id: "catalogue" }} columns={["model", "state", "does", "takes", "gives", { number: "tokens" }, { number: "parameters" }]}>
          {groups.slice((page - 1) * PAGE_SIZE, page * PAGE_SIZE).map((group) => <Row key={group[0] && baseId(group[0])} group={group} />)}
        </Table>
      )}
      {pages > 1 && (
        <p class="row">
          <button type="button" disabled={page === 1} onClick={() => filter({ page: `${page - 1}` })}>Previous</button>
          <span>{`Page ${page} of ${pages}`}</span>
          <button type="button" disabled={page === pages} onClick={() => filter({ page: `${page + 1}` })}>Next</button>
        </p>
      )}
    </section>
  );
}

/** A row for a model with its profiles. */
function Row({ group }: { group: Model[] }) {
  const model = group.find((model) => !model.variant_of) ?? group[0];
  if (!model) return null;
  const profiles = group.filter((profile) => profile !== model);
  const states = [model, ...profiles.filter((profile) => profile.state !== "available" && profile.state !== model.state)];
  const failure = group.find((profile) => profile.state === "failed")?.last_error;
  return (
    <tr>
      <td class="name">
        <a href={href("models", [model.id])}>{model.id}</a>
        {model.description && <p class="about">{model.description}</p>}
        {profiles.length > 0 && (
          <p class="about">
            {"Profiles: "}
            {profiles.map((profile, index) => <>{index > 0 && ", "}<a href={href("models", [profile.id])} aria-label={profile.id}>{profile.id.slice(model.id.length + 1) || profile.id}</a></>)}
          </p>
        )}
      </td>
      <td data-label="state" class="wrap">
        {states.map((profile) => <span class={`state ${profile.state}`}>{profile === model ? stateText(profile) : `${profile.id.slice(model.id.length)} ${stateText(profile)}`}</span>)}
        {failure && <p class="about bad">{failure.message}</p>}
      </td>
      <td data-label="does">{model.tasks.join(", ")}</td>
      <td data-label="takes">{model.inputs.join(", ")}</td>
      <td data-label="gives" class="wrap">{outputsText(model)}</td>
      <td data-label="tokens" class="number">{model.max_sequence_length}</td>
      <td data-label="parameters" class="number">{parameterCount(model)}</td>
    </tr>
  );
}
