import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { complaint, parsed } from "./json-map";
import { Compared } from "./playground-compare";
import { type Attached, attached, Files, inputOf, taken } from "./playground-files";
import type { Asked } from "./playground-parts";
import { type Call, type Input, type Outcome, run, type Verb } from "./playground-requests";
import { Result } from "./playground-result";
import type { Model } from "./types";

const EXAMPLES: Record<Verb, string> = {
  encode: "The cat sits on the mat.\nA kitten rests on a rug.\nStocks fell sharply today.\nThe market lost ground.",
  score: "Paris is the capital of France.\nBerlin is the capital of Germany.\nBread is made of flour.",
  extract: "Ada Lovelace met Charles Babbage in London in 1833.",
};
const DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2";
const MOST = 64; // inputs of which every pair is drawn
const VERBS: Verb[] = ["encode", "score", "extract"];
const OUTPUTS = ["dense", "sparse", "multivector"];

const base = (model: Model): string => model.variant_of ?? model.id;
// the vector that a MUVERA profile makes of a multivector is among its widths alone
const outputsOf = (model: Model | undefined): string[] =>
  OUTPUTS.filter((name) => model && (model.outputs.includes(name) || name in model.dims));

export function Playground({ models }: { models: Model[] }) {
  const known = useRef(models);
  known.current = models;
  const [verb, choose] = useState<Verb>("encode");
  // what is loaded answers at once; the default model is the next best to begin with
  const fitting = useMemo(() => {
    const rank = (model: Model): number => (model.state === "loaded" ? 0 : model.id === DEFAULT_MODEL ? 1 : 2);
    return models.filter((model) => model.tasks.includes(verb)).sort((a, b) => rank(a) - rank(b));
  }, [models, verb]);
  const [first, setFirst] = useState("");
  const [second, setSecond] = useState("");
  const [text, setText] = useState(EXAMPLES.encode);
  const [files, setFiles] = useState<Attached[]>([]);
  const [refused, setRefused] = useState<string[]>([]);
  const [query, setQuery] = useState("What is the capital of France?");
  const [pictures, setPictures] = useState<Attached[]>([]);
  const [notPictures, setNotPictures] = useState<string[]>([]);
  const [labels, setLabels] = useState("person, place, date");
  const [output, setOutput] = useState("dense");
  const [further, setFurther] = useState("");
  const [metadata, setMetadata] = useState("");
  const [done, setDone] = useState<{ outcomes: Outcome[]; asked: Asked[]; turn: number }>({ outcomes: [], asked: [], turn: 0 });
  const [running, setRunning] = useState(false);

  useEffect(() => {
    setFirst((old) => (fitting.some((model) => model.id === old) ? old : (fitting[0]?.id ?? "")));
    setSecond((old) => (fitting.some((model) => model.id === old) ? old : ""));
  }, [fitting]);
  useEffect(() => {
    function named() {
      const [, id] = /^#playground\/(.+)/.exec(location.hash) ?? [];
      const wanted = known.current.find((each) => each.id === decodeURIComponent(id ?? ""));
      const task = VERBS.find((each) => wanted?.tasks.includes(each));
      if (!wanted || !task) return;
      change(task);
      setFirst(wanted.id);
    }
    named();
    window.addEventListener("hashchange", named);
    return () => window.removeEventListener("hashchange", named);
  }, []);
  const model = fitting.find((each) => each.id === first);
  const outputs = outputsOf(model);
  const kinds = taken(model?.inputs ?? []);
  const texts = !model || model.inputs.includes("text");
  const late = verb === "encode" && (outputs.includes(output) ? output : outputs[0]) === "multivector";
  // models of late interaction encode an image as a query, but do not score with it
  const pictured = kinds.includes("image") && (late || (verb === "score" && !outputs.includes("multivector")));
  const complaints = [complaint(further), verb === "extract" ? complaint(metadata) : ""];
  const sendable = files.filter((file) => kinds.includes(file.kind));
  const ready = !running && model && (sendable.length > 0 || (texts && text.trim())) && !complaints.some(Boolean);

  function asked(): Asked[] {
    const lines = texts ? text.split("\n").map((line) => line.trim()).filter(Boolean) : [];
    const own = verb === "extract" && metadata.trim() ? { metadata: parsed(metadata) } : {};
    return [
      ...lines.map((line) => ({ name: line, input: { text: line } })),
      ...sendable.map((file) => ({ name: file.text.trim() ? `${file.name}: ${file.text.trim()}` : file.name, input: inputOf(file) })),
    ].slice(0, MOST).map(({ name, input }) => ({ name, input: { ...input, ...own } }));
  }

  function callsOf(wanted: Model, items: Input[]): Call[] {
    const others = parsed(further) ?? {};
    const call = (body: Call["body"], params: Record<string, unknown>): Call => {
      const all = { ...params, ...others };
      return { verb, model: wanted.id, body: { ...body, ...(Object.keys(all).length ? { params: all } : {}) } };
    };
    if (verb === "extract") {
      const named = labels.split(",").map((label) => label.trim()).filter(Boolean);
      return [call({ items }, named.length ? { labels: named } : {})];
    }
    const images = pictured ? pictures.map((each) => each.data) : [];
    const asking: Input = { ...(query.trim() || !images.length ? { text: query } : {}), ...(images.length ? { images } : {}) };
    if (verb === "score") return [call({ query: asking, items }, {})];
    const own = outputsOf(wanted);
    const type = own.includes(output) ? output : (own[0] ?? "dense");
    const documents = call({ items }, { output_types: [type] });
    return type === "multivector" ? [call({ items: [asking] }, { output_types: [type], is_query: true }), documents] : [documents];
  }

  async function submit(event: Event) {
    event.preventDefault();
    const given = asked();
    const chosen = [first, second].flatMap((id) => fitting.find((each) => each.id === id) ?? []);
    setRunning(true);
    try {
      const outcomes = await Promise.all(chosen.map((each) => run(each, callsOf(each, given.map(({ input }) => input)))));
      setDone((old) => ({ outcomes, asked: given, turn: old.turn + 1 }));
    } finally {
      setRunning(false);
    }
  }

  function change(next: Verb) {
    choose(next);
    setText((old) => (Object.values(EXAMPLES).includes(old) ? EXAMPLES[next] : old)); // own texts stay
    setDone((old) => ({ outcomes: [], asked: [], turn: old.turn }));
  }

  async function add(given: Iterable<File>) {
    const { found, refused: others } = await attached(given, kinds);
    setRefused(others);
    setFiles((old) => [...old, ...found].slice(0, MOST));
  }

  async function addPictures(given: Iterable<File>) {
    const { found, refused: others } = await attached(given, ["image"]);
    setNotPictures(others);
    setPictures((old) => [...old, ...found].slice(0, MOST));
  }

  function onPaste(event: ClipboardEvent) {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length || !kinds.length) return;
    event.preventDefault();
    void add(pasted);
  }

  const [one, other] = done.outcomes;
  return (
    <section>
      <form
        class="panel"
        onSubmit={submit}
        onPaste={onPaste}
        onDragOver={(event) => event.preventDefault()}
        onDrop={(event) => {
          // a browser would leave the page for a file that is dropped beside a field
          if (!event.dataTransfer?.files.length) return;
          event.preventDefault();
          if (kinds.length) void add([...event.dataTransfer.files]);
        }}
      >
        <div class="row" role="radiogroup" aria-label="Verb">
          {VERBS.map((each) => (
            <label class={`chip ${each === verb ? "on" : ""}`}>
              <input type="radio" name="verb" checked={each === verb} onChange={() => change(each)} />
              {each}
            </label>
          ))}
        </div>
        <div class="row">
          <Choice id="model" label="Model" models={fitting} value={first} onChange={setFirst} />
          <Choice id="beside" label="Beside it" models={fitting} value={second} onChange={setSecond} none="(nothing)" near={model} />
          {verb === "encode" && outputs.length > 1 && (
            <label>
              Output
              <select id="output" value={outputs.includes(output) ? output : outputs[0]} onChange={(event) => setOutput(event.currentTarget.value)}>
                {outputs.map((name) => <option value={name}>{name}</option>)}
              </select>
            </label>
          )}
        </div>
        {(verb === "score" || late) && (
          <label>
            Query
            <input id="query" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
          </label>
        )}
        {pictured && (
          <Files id="query-files" label="Images of the query" kinds={["image"]} files={pictures} onChange={setPictures} refused={notPictures} onFiles={addPictures} />
        )}
        {verb === "extract" && (
          <label>
            Labels, with commas between; none for a model that has its own
            <input id="labels" value={labels} onInput={(event) => setLabels(event.currentTarget.value)} />
          </label>
        )}
        {texts && (
          <label>
            {verb === "score" || late ? "Documents, one a line" : "Texts, one a line"}
            <textarea id="texts" rows={6} value={text} onInput={(event) => setText(event.currentTarget.value)} />
          </label>
        )}
        {kinds.length > 0 && (
          <Files id="files" label={`${kinds.map((kind) => ({ image: "Images", document: "Documents", audio: "Sounds" })[kind]).join(", ")}, each an input`} kinds={kinds} files={sendable} onChange={setFiles} refused={refused} onFiles={add} texts={texts} pasted />
        )}
        <details>
          <summary>Further parameters</summary>
          <Json id="further" label="Parameters, a map as JSON" placeholder='{"max_seq_length": 128}' value={further} onChange={setFurther} complaint={complaints[0] ?? ""} />
          {verb === "extract" && <Json id="metadata" label="Metadata of each input, a map as JSON" placeholder='{"entities": [{"label": "person", "start": 0, "end": 3}]}' value={metadata} onChange={setMetadata} complaint={complaints[1] ?? ""} />}
        </details>
        <button id="run" type="submit" disabled={!ready}>
          {running ? "Running" : "Run"}
        </button>
        {!fitting.length && <p class="dim">No model of the catalogue can {verb}.</p>}
      </form>
      <p class="unseen" role="status">{running ? "Running" : done.outcomes.map((each) => `${each.model.id} ${each.refusal ? "refused" : "answered"}`).join(", ")}</p>
      <div class="beside" aria-busy={running}>
        {done.outcomes.map((outcome) => <Result key={`${outcome.model.id} ${done.turn}`} outcome={outcome} asked={done.asked} />)}
        {one && other && <Compared first={one} second={other} asked={done.asked} />}
      </div>
    </section>
  );
}

function Choice(given: { id: string; label: string; models: Model[]; value: string; onChange: (id: string) => void; none?: string; near?: Model }) {
  const { near } = given;
  const option = (model: Model) => <option value={model.id}>{model.id}</option>;
  const profiles = given.models.filter((model) => near && base(model) === base(near));
  const grouped = profiles.length > 1;
  return (
    <label>
      {given.label}
      <select id={given.id} value={given.value} onChange={(event) => given.onChange(event.currentTarget.value)}>
        {given.none && <option value="">{given.none}</option>}
        {grouped && <optgroup label="Profiles of this model">{profiles.map(option)}</optgroup>}
        {grouped ? <optgroup label="Other models">{given.models.filter((model) => !profiles.includes(model)).map(option)}</optgroup> : given.models.map(option)}
      </select>
    </label>
  );
}

function Json(given: { id: string; label: string; placeholder: string; value: string; onChange: (value: string) => void; complaint: string }) {
  return (
    <>
      <label>
        {given.label}
        <textarea id={given.id} rows={2} spellcheck={false} placeholder={given.placeholder} value={given.value} aria-invalid={Boolean(given.complaint)} onInput={(event) => given.onChange(event.currentTarget.value)} />
      </label>
      {given.complaint && <p class="bad" role="alert">{given.complaint}</p>}
    </>
  );
}
