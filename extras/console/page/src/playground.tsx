import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { sortRank } from "./model-properties";
import { Picker, storeRecent } from "./picker";
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
const MAX_INPUTS = 64; // the page draws each pair of inputs
const VERBS: Record<Verb, string> = {
  encode: "Texts, images or sounds become vectors. See how alike they are.",
  score: "Documents are ranked by how well they answer a query.",
  extract: "Names, classes or objects are found in texts and images.",
};
const KINDS = { image: "Images", document: "Documents", audio: "Sounds" };

const verbOf = (text: string | undefined): Verb => (text !== undefined && Object.hasOwn(VERBS, text) ? (text as Verb) : "encode");

/** The playground. The route is `VERB/MODEL?with=MODEL`. */
export function Playground({ models, route, onFind }: { models: Model[]; route: Route; onFind: (text: string) => void }) {
  const canInfer = useScope("infer");
  const verb = verbOf(route.parts[0]);
  const routeModel = route.parts.slice(1).join("/");
  // A loaded model answers at once. Without one, the default model comes first.
  const fitting = useMemo(() => {
    const order = (model: Model): number => (model.state === "available" && model.id === DEFAULT_MODEL ? 0.5 : sortRank(model));
    return models.filter((model) => model.tasks.includes(verb)).sort((a, b) => order(a) - order(b));
  }, [models, verb]);
  const initialModels = useRef<Partial<Record<Verb, string>>>({}); // a model that is loaded later does not replace them
  initialModels.current[verb] ||= fitting[0]?.id ?? "";
  const first = fitting.some((model) => model.id === routeModel) ? routeModel : (initialModels.current[verb] ?? "");
  const second = fitting.find((model) => model.id === route.query.get("with"))?.id ?? "";
  const addressOf = (next: { verb?: Verb; first?: string; second?: string }): string =>
    next.verb ? href("playground", [next.verb]) : href("playground", [verb, next.first ?? first], { with: next.second ?? second });

  const [text, setText] = useState(EXAMPLES[verb]);
  const [files, setFiles] = useState<Attachment[]>([]);
  const [refusedFiles, setRefusedFiles] = useState<string[]>([]);
  const [query, setQuery] = useState(QUESTION);
  const [queryImages, setQueryImages] = useState<Attachment[]>([]);
  const [refusedQueryFiles, setRefusedQueryFiles] = useState<string[]>([]);
  const [settings, setSettings] = useState<Settings>(UNSET);
  const [lastRun, setLastRun] = useState<{ verb: Verb; outcomes: Outcome[]; inputs: NamedInput[]; settings: Settings; count: number }>({ verb, outcomes: [], inputs: [], settings: UNSET, count: 0 });
  const [running, setRunning] = useState<AbortController>();
  const set = (name: keyof Settings, value: string | undefined) => setSettings((old) => ({ ...old, [name]: value }));

  const model = fitting.find((model) => model.id === first);
  const kinds = acceptedKinds(model?.inputs ?? []);
  const takesText = !model || model.inputs.includes("text");
  const isLate = isLateInteraction(verb, settings, model);
  const hasChunks = isChunked(verb, settings, model);
  const hasQuery = verb === "score" || isLate || hasChunks;
  // Models of late interaction encode an image as a query, but do not score with an image.
  const takesQueryImages = kinds.includes("image") && (isLate || (verb === "score" && !outputsOf(model).includes("multivector")));
  const usableFiles = hasChunks ? [] : files.filter((file) => kinds.includes(file.kind));
  const lines = takesText ? text.split("\n").map((line) => line.trim()).filter(Boolean) : [];
  const inputCount = hasChunks ? Math.min(1, lines.length) : lines.length + usableFiles.length;
  const isValid = !Object.keys(faultsOf(verb, settings, model)).length;
  const refusals = serverFaults(lastRun.outcomes.filter((outcome) => [first, second].includes(outcome.model.id)).map(({ refusal }) => refusal), lastRun.settings, settings);
  const isReady = !running && canInfer && model && inputCount > 0 && isValid;

  useEffect(() => setText((old) => (Object.values(EXAMPLES).includes(old) ? EXAMPLES[verb] : old)), [verb]); // texts of the user stay
  // The page sends its example by itself if the models are loaded already.
  const isLoaded = [first, second].every((id) => !id || fitting.find((model) => model.id === id)?.state === "loaded");
  const runsExample = canInfer && model && isLoaded && text === EXAMPLES[verb] && query === QUESTION && takesText && lastRun.verb === verb && !lastRun.count;
  useEffect(() => {
    if (runsExample && !running) void submit();
  }, [runsExample, verb]);

  function namedInputs(): NamedInput[] {
    if (hasChunks) return [{ name: text.trim(), input: { text, chunks: { max_tokens: Number(settings.chunks) }, context: settings.context === "true" } }];
    const metadata = verb === "extract" && settings.metadata.trim() ? { metadata: parseMap(settings.metadata) } : {};
    return [
      ...lines.map((line) => ({ name: line, input: { text: line } })),
      ...usableFiles.map((file) => ({ name: file.text.trim() ? `${file.name}: ${file.text.trim()}` : file.name, input: inputOf(file) })),
    ].slice(0, MAX_INPUTS).map(({ name, input }) => ({ name, input: { ...input, ...metadata } }));
  }

  function callsOf(model: Model, items: Input[]): Call[] {
    const params = paramsOf(verb, settings, model);
    const call = (body: Call["body"], more: Record<string, unknown> = {}): Call => {
      const merged = { ...more, ...params };
      return { verb, model: model.id, body: { ...body, ...(Object.keys(merged).length ? { params: merged } : {}) } };
    };
    if (verb === "extract") return [call({ items })];
    const images = takesQueryImages ? queryImages.map((image) => image.data) : [];
    const queryInput: Input = { ...(query.trim() || !images.length ? { text: query } : {}), ...(images.length ? { images } : {}) };
    if (verb === "score") return [call({ query: queryInput, items })];
    return hasChunks || outputOf(settings, model) === "multivector" ? [call({ items: [queryInput] }, { is_query: true }), call({ items })] : [call({ items })];
  }

  async function submit(event?: Event) {
    event?.preventDefault();
    const inputs = namedInputs();
    const chosenModels = [first, second].flatMap((id) => fitting.find((model) => model.id === id) ?? []);
    const controller = new AbortController();
    setRunning(controller);
    try {
      const outcomes = await Promise.all(chosenModels.map((model) => runCalls(model, callsOf(model, inputs.map(({ input }) => input)), controller.signal)));
      if (event) storeRecent(chosenModels.map((model) => model.id));
      setLastRun((old) => ({ verb, outcomes, inputs, settings, count: old.count + 1 }));
    } finally {
      setRunning(undefined);
    }
  }

  function changeVerb(next: Verb) {
    navigate(addressOf({ verb: next }));
    setLastRun({ verb: next, outcomes: [], inputs: [], settings: UNSET, count: 0 });
  }

  async function addFiles(files: Iterable<File>) {
    const { attachments, refused } = await readAttachments(files, kinds);
    setRefusedFiles(refused);
    setFiles((old) => [...old, ...attachments]);
  }

  async function addQueryImages(files: Iterable<File>) {
    const { attachments, refused } = await readAttachments(files, ["image"]);
    setRefusedQueryFiles(refused);
    setQueryImages((old) => [...old, ...attachments]);
  }

  function onPaste(event: ClipboardEvent) {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length || !kinds.length) return;
    event.preventDefault();
    void addFiles(pasted);
  }

  const shown = lastRun.verb === verb ? lastRun.outcomes : []; // the verb changes by a step back too
  const [left, right] = shown;
  return (
    <section>
      <div class="verbs" role="radiogroup" aria-label="What to do">
        {Object.entries(VERBS).map(([name, description]) => (
          <label class={`card ${name === verb ? "on" : ""}`}>
            <input type="radio" name="verb" value={name} checked={name === verb} onChange={() => changeVerb(name as Verb)} />
            <b>{name}</b>
            <span>{description}</span>
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
            // the browser would leave the page for a file that is dropped beside a field
            if (!event.dataTransfer?.files.length) return;
            event.preventDefault();
            if (kinds.length) void addFiles([...event.dataTransfer.files]);
          }}
        >
          <div class="pickers">
            <Picker id="model" label="Model" models={fitting} value={first} onChange={(id) => navigate(addressOf({ first: id }))} onFind={onFind} />
            <Picker id="beside" label="Compare with" models={fitting} value={second} onChange={(id) => navigate(addressOf({ second: id }))} none="nothing" comparedModel={model} onFind={onFind} />
          </div>
          {routeModel && routeModel !== first && <p class="warn">{`${routeModel} is not in the catalogue as a model for ${verb}${first ? `: ${first} is used instead` : ""}. `}<a href={href("models", [], { add: routeModel })}>Add it</a></p>}
          <div class="ask">
          {hasQuery && (
            <label>
              Query
              <input id="query" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
            </label>
          )}
          {takesQueryImages && (
            <Files id="query-files" label="Images of the query" kinds={["image"]} files={queryImages} onChange={setQueryImages} refused={refusedQueryFiles} onFiles={addQueryImages} />
          )}
          {takesText && (
            <label>
              {hasChunks ? "Document" : hasQuery ? "Documents, one per line" : "Texts, one per line"}
              <textarea id="texts" rows={second ? 4 : 6} value={text} onInput={(event) => setText(event.currentTarget.value)} />
            </label>
          )}
          {kinds.length > 0 && !hasChunks && (
            <Files id="files" label={`${kinds.map((kind) => KINDS[kind]).join(", ")}, each an input`} kinds={kinds} files={usableFiles} onChange={setFiles} refused={refusedFiles} onFiles={addFiles} hasTexts={takesText} acceptsPaste />
          )}
          </div>
          <div class="ask">
          <Controls verb={verb} model={model} settings={settings} set={set} refusals={refusals} />
          <JsonParameters verb={verb} model={model} settings={settings} set={set} refusals={refusals} />
          <span class="row">
            <button id="run" type="submit" disabled={!isReady}>{running ? "Running" : "Run"}</button>
            <span class="warn" id="input-count" role="status">{inputCount > MAX_INPUTS && `${MAX_INPUTS} of ${inputCount} inputs are sent: the first ones, texts before files.`}</span>
            {running && <button type="button" id="stop" onClick={() => running.abort()}>Stop</button>}
            {running && model?.state !== "loaded" && <span class="dim">{`${first} is loaded first, which may take a while.`}</span>}
          </span>
          <MissingScope scope="infer" subject="Requests need" />
          {!fitting.length && <p class="warn">{`No model of the catalogue can ${verb}. `}<a href={href("models", [], { add: "ID" })}>Add a model</a></p>}
          </div>
        </form>
        <p class="unseen" role="status">{running ? "Running" : shown.map((outcome) => `${outcome.model.id} ${outcome.refusal ? "refused" : "answered"}`).join(", ")}</p>
        <div class="beside" aria-busy={Boolean(running)}>
          {left && right && <Comparison first={left} second={right} inputs={lastRun.inputs} />}
          {shown.map((outcome) => <Result key={`${outcome.model.id} ${lastRun.count}`} outcome={outcome} inputs={lastRun.inputs} />)}
          {!shown.length && !runsExample && <Example verb={verb} model={model} />}
        </div>
      </div>
    </section>
  );
}
