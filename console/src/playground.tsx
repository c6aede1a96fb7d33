import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { sortRank } from "./model-properties";
import { noteUse, Picker } from "./picker";
import { Comparison } from "./playground-compare";
import { JsonParameters, faultsOf, Controls, isChunked, isLateInteraction, outputOf, outputsOf, paramsOf, serverFaults, type Settings, UNSET } from "./playground-controls";
import { Example, EXAMPLES, QUESTION } from "./playground-example";
import { type Attachment, readAttachments, Files, inputOf, acceptedKinds } from "./playground-files";
import type { NamedInput } from "./playground-shared";
import { type Call, type Input, type Outcome, runCalls, type Verb } from "./playground-requests";
import { Result } from "./playground-result";
import { parseMap } from "./json-fields";
import { navigate, href, type Route } from "./routes";
import { MissingScope, useScope } from "./session";
import type { Model } from "./types";

const DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2";
const MOST = 64; // inputs of which every pair is drawn
const VERBS: Record<Verb, string> = {
  encode: "Texts, images or sounds become vectors. See how alike they are.",
  score: "Documents are ranked by how well they answer a query.",
  extract: "Names, classes or objects are found in texts and images.",
};
const KINDS = { image: "Images", document: "Documents", audio: "Sounds" };

const verbOf = (text: string | undefined): Verb => (text !== undefined && text in VERBS ? (text as Verb) : "encode");

/** `route`: of this view, `encode/MODEL?with=MODEL`. */
export function Playground({ models, route, onFind }: { models: Model[]; route: Route; onFind: (text: string) => void }) {
  const canInfer = useScope("infer");
  const verb = verbOf(route.parts[0]);
  const named = route.parts.slice(1).join("/");
  // what is loaded answers at once; the default model is the next best to begin with
  const fitting = useMemo(() => {
    const order = (model: Model): number => (model.state === "available" && model.id === DEFAULT_MODEL ? 0.5 : sortRank(model));
    return models.filter((model) => model.tasks.includes(verb)).sort((a, b) => order(a) - order(b));
  }, [models, verb]);
  const begun = useRef<Partial<Record<Verb, string>>>({}); // a model that is loaded later does not take its place
  begun.current[verb] ||= fitting[0]?.id ?? "";
  const first = fitting.some((model) => model.id === named) ? named : (begun.current[verb] ?? "");
  const second = fitting.find((model) => model.id === route.query.get("with"))?.id ?? "";
  const address = (next: { verb?: Verb; first?: string; second?: string }): string =>
    next.verb ? href("playground", [next.verb]) : href("playground", [verb, next.first ?? first], { with: next.second ?? second });

  const [text, setText] = useState(EXAMPLES[verb]);
  const [files, setFiles] = useState<Attachment[]>([]);
  const [refused, setRefused] = useState<string[]>([]);
  const [query, setQuery] = useState(QUESTION);
  const [pictures, setPictures] = useState<Attachment[]>([]);
  const [notPictures, setNotPictures] = useState<string[]>([]);
  const [settings, setSettings] = useState<Settings>(UNSET);
  const [done, setDone] = useState<{ verb: Verb; outcomes: Outcome[]; inputs: NamedInput[]; settings: Settings; turn: number }>({ verb, outcomes: [], inputs: [], settings: UNSET, turn: 0 });
  const [running, setRunning] = useState<AbortController>();
  const set = (name: keyof Settings, value: string | undefined) => setSettings((old) => ({ ...old, [name]: value }));

  const model = fitting.find((model) => model.id === first);
  const kinds = acceptedKinds(model?.inputs ?? []);
  const texts = !model || model.inputs.includes("text");
  const late = isLateInteraction(verb, settings, model);
  const chunked = isChunked(verb, settings, model);
  const hasQuery = verb === "score" || late || chunked;
  // models of late interaction encode an image as a query, but do not score with it
  const pictured = kinds.includes("image") && (late || (verb === "score" && !outputsOf(model).includes("multivector")));
  const sendable = chunked ? [] : files.filter((file) => kinds.includes(file.kind));
  const hasInput = sendable.length > 0 || (texts && Boolean(text.trim()));
  const isSound = !Object.keys(faultsOf(verb, settings, model)).length;
  const refusals = serverFaults(done.outcomes.filter((outcome) => [first, second].includes(outcome.model.id)).map(({ refusal }) => refusal), done.settings, settings);
  const ready = !running && canInfer && model && hasInput && isSound;

  useEffect(() => setText((old) => (Object.values(EXAMPLES).includes(old) ? EXAMPLES[verb] : old)), [verb]); // own texts stay
  // a result is there before anything is pressed, where it costs no load
  const isLoaded = [first, second].every((id) => !id || fitting.find((model) => model.id === id)?.state === "loaded");
  const isIdle = canInfer && model && isLoaded && text === EXAMPLES[verb] && query === QUESTION && texts && done.verb === verb && !done.turn;
  useEffect(() => {
    if (isIdle && !running) void submit();
  }, [isIdle, verb]);

  function sentInputs(): NamedInput[] {
    if (chunked) return [{ name: text.trim(), input: { text, chunks: { max_tokens: Number(settings.chunks) }, context: settings.context === "true" } }];
    const lines = texts ? text.split("\n").map((line) => line.trim()).filter(Boolean) : [];
    const own = verb === "extract" && settings.metadata.trim() ? { metadata: parseMap(settings.metadata) } : {};
    return [
      ...lines.map((line) => ({ name: line, input: { text: line } })),
      ...sendable.map((file) => ({ name: file.text.trim() ? `${file.name}: ${file.text.trim()}` : file.name, input: inputOf(file) })),
    ].slice(0, MOST).map(({ name, input }) => ({ name, input: { ...input, ...own } }));
  }

  function callsOf(model: Model, items: Input[]): Call[] {
    const params = paramsOf(verb, settings, model);
    const call = (body: Call["body"], more: Record<string, unknown> = {}): Call => {
      const all = { ...more, ...params };
      return { verb, model: model.id, body: { ...body, ...(Object.keys(all).length ? { params: all } : {}) } };
    };
    if (verb === "extract") return [call({ items })];
    const images = pictured ? pictures.map((picture) => picture.data) : [];
    const asking: Input = { ...(query.trim() || !images.length ? { text: query } : {}), ...(images.length ? { images } : {}) };
    if (verb === "score") return [call({ query: asking, items })];
    return chunked || outputOf(settings, model) === "multivector" ? [call({ items: [asking] }, { is_query: true }), call({ items })] : [call({ items })];
  }

  async function submit(event?: Event) {
    event?.preventDefault();
    const inputs = sentInputs();
    const chosen = [first, second].flatMap((id) => fitting.find((model) => model.id === id) ?? []);
    const controller = new AbortController();
    setRunning(controller);
    try {
      const outcomes = await Promise.all(chosen.map((model) => runCalls(model, callsOf(model, inputs.map(({ input }) => input)), controller.signal)));
      if (event) noteUse(chosen.map((model) => model.id));
      setDone((old) => ({ verb, outcomes, inputs, settings, turn: old.turn + 1 }));
    } finally {
      setRunning(undefined);
    }
  }

  function change(next: Verb) {
    navigate(address({ verb: next }));
    setDone({ verb: next, outcomes: [], inputs: [], settings: UNSET, turn: 0 });
  }

  async function add(files: Iterable<File>) {
    const { attachments, refused: refusals } = await readAttachments(files, kinds);
    setRefused(refusals);
    setFiles((old) => [...old, ...attachments].slice(0, MOST));
  }

  async function addPictures(files: Iterable<File>) {
    const { attachments, refused: refusals } = await readAttachments(files, ["image"]);
    setNotPictures(refusals);
    setPictures((old) => [...old, ...attachments].slice(0, MOST));
  }

  function onPaste(event: ClipboardEvent) {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length || !kinds.length) return;
    event.preventDefault();
    void add(pasted);
  }

  const shown = done.verb === verb ? done.outcomes : []; // back leads to another verb
  const [left, right] = shown;
  return (
    <section>
      <div class="verbs" role="radiogroup" aria-label="What to do">
        {Object.entries(VERBS).map(([name, words]) => (
          <label class={`card ${name === verb ? "on" : ""}`}>
            <input type="radio" name="verb" value={name} checked={name === verb} onChange={() => change(name as Verb)} />
            <b>{name}</b>
            <span>{words}</span>
          </label>
        ))}
      </div>
      <div class={`work ${right ? "two" : ""}`}>
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
          <div class="pickers">
            <Picker id="model" label="Model" models={fitting} value={first} onChange={(id) => navigate(address({ first: id }))} onFind={onFind} />
            <Picker id="beside" label="Compare with" models={fitting} value={second} onChange={(id) => navigate(address({ second: id }))} none="nothing" near={model} onFind={onFind} />
          </div>
          {named && named !== first && <p class="warn">{`${named} is not among the models that ${verb}: ${first || "none"} is asked instead. `}<a href={href("models", [], { add: named })}>Add it</a></p>}
          <div class="ask">
          {hasQuery && (
            <label>
              Query
              <input id="query" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
            </label>
          )}
          {pictured && (
            <Files id="query-files" label="Images of the query" kinds={["image"]} files={pictures} onChange={setPictures} refused={notPictures} onFiles={addPictures} />
          )}
          {texts && (
            <label>
              {chunked ? "Document" : hasQuery ? "Documents, one per line" : "Texts, one per line"}
              <textarea id="texts" rows={second ? 4 : 6} value={text} onInput={(event) => setText(event.currentTarget.value)} />
            </label>
          )}
          {kinds.length > 0 && !chunked && (
            <Files id="files" label={`${kinds.map((kind) => KINDS[kind]).join(", ")}, each an input`} kinds={kinds} files={sendable} onChange={setFiles} refused={refused} onFiles={add} texts={texts} pasted />
          )}
          </div>
          <div class="ask">
          <Controls verb={verb} model={model} settings={settings} set={set} refused={refusals} />
          <JsonParameters verb={verb} model={model} settings={settings} set={set} refused={refusals} />
          <span class="row">
            <button id="run" type="submit" disabled={!ready}>{running ? "Running" : "Run"}</button>
            {running && <button type="button" id="stop" onClick={() => running.abort()}>Stop</button>}
            {running && model?.state !== "loaded" && <span class="dim">{`${first} is loaded first, which may take a while.`}</span>}
          </span>
          <MissingScope scope="infer" subject="Requests need" />
          {!fitting.length && <p class="warn">{`No model of the catalogue can ${verb}. `}<a href={href("models", [], { add: "ID" })}>Add a model</a></p>}
          </div>
        </form>
        <p class="unseen" role="status">{running ? "Running" : shown.map((outcome) => `${outcome.model.id} ${outcome.refusal ? "refused" : "answered"}`).join(", ")}</p>
        <div class="beside" aria-busy={Boolean(running)}>
          {left && right && <Comparison first={left} second={right} inputs={done.inputs} />}
          {shown.map((outcome) => <Result key={`${outcome.model.id} ${done.turn}`} outcome={outcome} inputs={done.inputs} />)}
          {!shown.length && !isIdle && <Example verb={verb} model={model} />}
        </div>
      </div>
    </section>
  );
}
