import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { address, get, keep, key } from "./api";
import { Cluster } from "./cluster";
import { Jobs } from "./jobs";
import { Models } from "./models";
import { Playground } from "./playground";
import type { Model, Models as Listed } from "./types";

const VIEWS = { playground: "Playground", models: "Models", jobs: "Jobs", cluster: "Cluster" } as const;
type View = keyof typeof VIEWS;
const MODELS_EVERY_MS = 5_000;
const LOADING_EVERY_MS = 2_000; // while something is loaded or downloaded
const MODELS = 200; // that are read; a name finds others
const TYPED_MS = 250; // of rest, after which what was typed is asked for

/** `#playground/ID` is the playground with a model. */
function viewOf(hash: string): View {
  const [name = ""] = hash.slice(1).split("/");
  return name in VIEWS ? (name as View) : "playground";
}

function App() {
  const [view, setView] = useState<View>(viewOf(location.hash));
  const [models, setModels] = useState<Model[]>();
  const [total, setTotal] = useState(0);
  const [wanted, setWanted] = useState("");
  const [refusal, setRefusal] = useState<SIEError>();
  const [signedIn, setSignedIn] = useState(0);
  const wasPlayed = useRef(false);
  const [wantsKey, setWantsKey] = useState(false); // where reading needs none

  useEffect(() => {
    const changed = () => setView(viewOf(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  const showsModels = view !== "cluster";
  useEffect(() => {
    let ended = false;
    let timer = 0;
    let everyMs = MODELS_EVERY_MS;
    async function turn() {
      if (document.visibilityState === "visible") {
        try {
          const told = await get<Listed>(`/v1/models?limit=${MODELS}&filter=${encodeURIComponent(wanted.trim())}`);
          if (ended) return;
          setModels(told.models);
          everyMs = told.models.some((each) => each.state === "loading" || each.downloads.length) ? LOADING_EVERY_MS : MODELS_EVERY_MS;
          if (!wanted.trim()) setTotal(told.total ?? 0);
          setRefusal(undefined);
          if (!showsModels) return; // the first answer told whether the key is good, and the cluster has figures of its own
        } catch (error) {
          if (!(error instanceof SIEError)) throw error;
          if (ended) return;
          setRefusal(error);
        }
      }
      timer = window.setTimeout(turn, everyMs);
    }
    timer = window.setTimeout(turn, wanted ? TYPED_MS : 0);
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [signedIn, wanted, showsModels]);

  function signIn(value: string) {
    setWantsKey(false);
    keep(value);
    setModels(undefined);
    setRefusal(undefined);
    setSignedIn((count) => count + 1);
  }

  wasPlayed.current ||= view === "playground";
  const isRefused = refusal && (refusal.status === 401 || refusal.status === 403);
  if (isRefused || wantsKey) return <SignIn refusal={isRefused ? refusal : undefined} onKey={signIn} onBack={isRefused ? undefined : () => setWantsKey(false)} />;
  return (
    <>
      <header>
        <h1>SIE</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, title]) => (
            <a href={`#${name}`} aria-current={view === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <span class="rest">
          <a href={address("docs")}>API</a>
          {key() ? <button type="button" class="link" id="sign-out" onClick={() => signIn("")}>Sign out</button>
            : <button type="button" class="link" id="sign-in" onClick={() => setWantsKey(true)}>Sign in</button>}
        </span>
      </header>
      <main>
        {refusal && view !== "cluster" && <p class="bad" role="alert">{refusal.message}</p>}
        {view !== "cluster" && total > MODELS && (
          <label class="row find">
            {`Find a model among ${total}`}
            <input id="find-model" type="search" value={wanted} placeholder="a part of its name" onInput={(event) => setWanted(event.currentTarget.value)} />
          </label>
        )}
        {view === "cluster" ? <Cluster key={signedIn} />
          : !models ? <p class="dim" role="status">{refusal ? "" : "reading the catalogue"}</p>
          : view === "models" ? <Models models={models} />
          : view === "jobs" && <Jobs key={signedIn} models={models} />}
        {/* what was typed there, and what came back, stays while another view is looked at */}
        {models && wasPlayed.current && <div hidden={view !== "playground"}><Playground key={signedIn} models={models} /></div>}
      </main>
    </>
  );
}

function SignIn({ refusal, onKey, onBack }: { refusal?: SIEError; onKey: (value: string) => void; onBack?: () => void }) {
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
        {refusal && key() && <p class="bad" role="alert">{refusal.message}</p>}
        <span class="row">
          <button type="submit">Sign in</button>
          {onBack && <button type="button" onClick={onBack}>Go on without</button>}
        </span>
        <p class="dim">The key needs the scope read; the playground and jobs also infer, changes of models config, dead letters, load, unload and the doctor admin. It is kept in this tab until it is closed, and nowhere else. The administrator's token of a <code>sie serve</code> on this machine is in <code>access.json</code> of its data directory.</p>
      </form>
    </main>
  );
}

const place = document.getElementById("app");
if (place) render(<App />, place);
