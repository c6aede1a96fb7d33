import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { InvalidInputError, SIEAbortError, SIEConnectionError, SIEError } from "sie-client";
import { urlOf, getJson, storeKey, readKey } from "./api";
import { Cluster } from "./cluster";
import { shellCommand } from "./code";
import { CodeSamples } from "./code-samples";
import { Jobs } from "./jobs";
import { modelPath } from "./model-properties";
import { Models } from "./models";
import { readRecent } from "./picker";
import { Playground } from "./playground";
import { href, type Route, useRoute, VIEWS, type View } from "./routes";
import { SessionContext } from "./session";
import type { Model, ModelPage, Whoami } from "./types";

const MODELS_EVERY_MS = 5_000;
const LOADING_EVERY_MS = 2_000; // while a model is loaded or downloaded
const MAX_MODELS = 200; // of one list; a search finds the others
const SEARCH_DELAY_MS = 250; // after the last key

const listModels = (filter: Record<string, string> = {}): Promise<ModelPage> => getJson<ModelPage>(`/v1/models?${new URLSearchParams({ limit: `${MAX_MODELS}`, ...filter })}`);

/** Return a model, undefined if the catalogue has none of this name, or no model may have it. */
const readModel = (id: string): Promise<Model | undefined> =>
  getJson<Model>(modelPath(id)).catch((error: unknown) => {
    if (error instanceof InvalidInputError || (error instanceof SIEError && error.status === 404)) return undefined;
    throw error;
  });

/** Return the first models of the catalogue, and how many it has. If it has more, the list also has the loaded models, the
 * models in `names`, and the results of all searches, which `cached` collects. */
async function readModels(search: string, names: string[], cached: Map<string, Model>): Promise<{ models: Model[]; total: number }> {
  const [first, searched] = await Promise.all([listModels(), search ? listModels({ filter: search }) : undefined]);
  const total = first.total ?? 0;
  if (total <= MAX_MODELS) return { models: first.models, total };
  for (const model of searched?.models ?? []) cached.set(model.id, model);
  const [loaded, ...rest] = await Promise.all([listModels({ loaded: "true" }), ...names.filter((id) => !first.models.some((model) => model.id === id)).map(readModel)]);
  const all = [...cached.values(), ...rest.filter((model) => model !== undefined), ...loaded.models, ...first.models];
  return { models: [...new Map(all.map((model) => [model.id, model])).values()], total };
}

/** The page: the navigation and the view of the route, or the form for signing in. */
function App() {
  const route = useRoute();
  const { view } = route;
  const [models, setModels] = useState<Model[]>();
  const [total, setTotal] = useState(0);
  const [typedSearch, setTypedSearch] = useState("");
  const [scopes, setScopes] = useState<string[]>();
  const [refusal, setRefusal] = useState<SIEError>();
  const [signIns, setSignIns] = useState(0);
  const playgroundRoute = useRef<Route>(undefined); // the playground stays mounted behind other views, with its texts and results
  const [wantsKey, setWantsKey] = useState(false); // the user signs in although reading needs no key

  const cached = useRef(new Map<string, Model>()); // results of searches in a large catalogue
  const playgroundModels = view === "playground" ? [route.parts.slice(1).join("/"), route.query.get("with") ?? ""].join(" ") : "";

  const showsModels = view !== "cluster";
  const search = total > MAX_MODELS ? typedSearch.trim() : ""; // a smaller catalogue is on the page
  useEffect(() => {
    let ended = false;
    let timer = 0;
    let everyMs = MODELS_EVERY_MS;
    let hasScopes = false;
    async function poll() {
      if (document.visibilityState === "visible") {
        try {
          const [identity, listing] = await Promise.all([hasScopes ? undefined : getJson<Whoami>("/v1/whoami"), readModels(search, [...new Set([...playgroundModels.split(" "), ...readRecent()])].filter(Boolean), cached.current)]);
          if (ended) return;
          hasScopes = true;
          if (identity) setScopes(identity.scopes);
          setModels(listing.models);
          everyMs = listing.models.some((model) => model.state === "loading" || model.downloads.length) ? LOADING_EVERY_MS : MODELS_EVERY_MS;
          setTotal(listing.total);
          setRefusal(undefined);
          if (!showsModels) return; // the reply has shown that the key is valid, and the view of the cluster polls by itself
        } catch (error) {
          if (!(error instanceof SIEError)) throw error;
          if (ended) return;
          setRefusal(error);
        }
      }
      timer = window.setTimeout(poll, everyMs);
    }
    timer = window.setTimeout(poll, search ? SEARCH_DELAY_MS : 0);
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [signIns, search, showsModels, playgroundModels]);
  useEffect(() => {
    document.title = `${VIEWS[view]} · SIE`;
  }, [view]);

  function signIn(value: string) {
    setWantsKey(false);
    storeKey(value);
    setModels(undefined);
    setScopes(undefined);
    setRefusal(undefined);
    setSignIns((count) => count + 1);
  }

  if (view === "playground") playgroundRoute.current = route;
  const playground = playgroundRoute.current;
  const isRefused = refusal && (refusal.status === 401 || refusal.status === 403 || refusal.param === "authorization"); // a header cannot hold each key
  const isAway = refusal instanceof SIEConnectionError || refusal instanceof SIEAbortError;
  if (isRefused || wantsKey) return <SignIn refusal={isRefused ? refusal : undefined} onKey={signIn} onBack={isRefused ? undefined : () => setWantsKey(false)} />;
  const viewAddress = (name: View): string => (name === "playground" && playground ? href(name, playground.parts, Object.fromEntries(playground.query)) : href(name));
  return (
    <SessionContext.Provider value={{ scopes: scopes ?? [], signIn: () => setWantsKey(true), unlisted: Math.max(0, total - (models?.length ?? 0)) }}>
      <header>
        <h1>SIE</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, title]) => (
            <a href={viewAddress(name as View)} data-view={name} aria-current={view === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <span class="rest">
          <a href={urlOf("docs")}>API</a>
          {readKey() ? <button type="button" class="link" id="sign-out" onClick={() => signIn("")}>Sign out</button>
            : models && !scopes?.includes("admin") && <button type="button" class="link" id="sign-in" onClick={() => setWantsKey(true)}>Sign in as administrator</button>}
        </span>
      </header>
      <main>
        {refusal && view !== "cluster" && <p class="bad" role="alert">{isAway ? "The gateway does not answer. This page tries again by itself." : refusal.message}</p>}
        {!models ? <p class="dim" role="status">{refusal && view !== "cluster" ? "" : "reading the catalogue"}</p>
          : view === "cluster" ? <Cluster key={signIns} route={route} />
          : view === "models" ? <Models models={models} total={total} route={route} onFind={setTypedSearch} />
          : view === "jobs" && <Jobs key={signIns} models={models} parts={route.parts} onFind={setTypedSearch} />}
        {models && playground && <div hidden={view !== "playground"}><Playground key={signIns} models={models} route={playground} onFind={setTypedSearch} /></div>}
      </main>
    </SessionContext.Provider>
  );
}

/** The form for the API key. */
function SignIn({ refusal, onKey, onBack }: { refusal?: SIEError | undefined; onKey: (value: string) => void; onBack?: (() => void) | undefined }) {
  const [value, setValue] = useState("");
  return (
    <main class="sign-in">
      <form
        class="panel"
        onSubmit={(event) => {
          event.preventDefault();
          if (value.trim()) onKey(value.trim());
        }}
      >
        <h1>SIE</h1>
        <label>
          API key
          <input id="key" type="password" autocomplete="off" spellcheck={false} value={value} onInput={(event) => setValue(event.currentTarget.value)} />
        </label>
        {refusal && readKey() && <p class="bad" role="alert">{refusal.message}</p>}
        <span class="row">
          <button type="submit">Sign in</button>
          {onBack && <button type="button" id="key-back" onClick={onBack}>{readKey() ? "Keep the present key" : "Continue without a key"}</button>}
        </span>
        <h2>Which key?</h2>
        <p>In a terminal on the machine of a <code>sie serve</code>, this prints the administrator's token. If the server was started with <code>--data-dir FOLDER</code>, add the same.</p>
        <CodeSamples title="" programs={[shellCommand("sie keys admin")]} open />
        <p>Elsewhere: a key that <code>sie keys create NAME</code> prints. Its scopes allow:</p>
        <dl class="pairs-of">
          <div><dt>read</dt><dd>models and the state of the cluster</dd></div>
          <div><dt>infer</dt><dd>the playground and jobs</dd></div>
          <div><dt>config</dt><dd>changes of models</dd></div>
          <div><dt>admin</dt><dd>load and unload, dead letters, the doctor</dd></div>
        </dl>
        <p class="dim">The key stays in this tab until it is closed, and is stored nowhere else.</p>
      </form>
    </main>
  );
}

const root = document.getElementById("app");
if (root) render(<App />, root);
