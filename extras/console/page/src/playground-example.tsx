/** The example on the page before the first result. Its figures were computed once, with all-MiniLM-L6-v2. */

import { Bars } from "./playground-shared";
import { MarkedText } from "./playground-extract";
import type { Verb } from "./playground-requests";
import { SimilarityTable } from "./playground-vectors";
import type { Model } from "./types";

export const EXAMPLES: Record<Verb, string> = {
  encode: "The cat sits on the mat.\nA kitten rests on a rug.\nStocks fell sharply today.\nThe market lost ground.",
  score: "Paris is the capital of France.\nBerlin is the capital of Germany.\nBread is made of flour.",
  extract: "Ada Lovelace met Charles Babbage in London in 1833.",
};
export const QUESTION = "What is the capital of France?";

const COSINES = [[1, 0.65, 0.07, 0.01], [0.65, 1, 0.1, -0.03], [0.07, 0.1, 1, 0.49], [0.01, -0.03, 0.49, 1]];
const SCORES = [0.86, 0.4, 0.17];
const ENTITIES: [string, string][] = [["Ada Lovelace", "person"], ["Charles Babbage", "person"], ["London", "place"], ["1833", "date"]];

const exampleLines = (verb: Verb): string[] => EXAMPLES[verb].split("\n");

/** An example of a result, and the model that Run would use. */
export function Example({ verb, model }: { verb: Verb; model?: Model | undefined }) {
  const note = !model ? "Run sends it to a model" : model.state === "failed" ? `${model.id} could not be loaded${model.last_error ? `: ${model.last_error.message}` : ""}` : `Run sends it to ${model.id}, which is loaded first`;
  return (
    <article class="panel example">
      <h2>Example</h2>
      <p class="dim">{`An example of a result; ${verb === "extract" ? "drawn by hand" : "computed earlier with all-MiniLM-L6-v2"}.`}</p>
      <p class={model?.state === "failed" ? "bad" : "dim"}>{`${note}.`}</p>
      {verb === "encode" && <SimilarityTable matrix={COSINES} names={exampleLines("encode")} />}
      {verb === "score" && (
        <>
          <h3>{`Documents, best first: ${QUESTION}`}</h3>
          <Bars label="Scores of the example" least={0} most={1} rows={exampleLines("score").map((name, index) => ({ name, value: SCORES[index] ?? 0 }))} />
        </>
      )}
      {verb === "extract" && <MarkedText text={EXAMPLES.extract} entities={ENTITIES.map(([text, label]) => ({ text, label, score: 1, bbox: null, start: EXAMPLES.extract.indexOf(text), end: EXAMPLES.extract.indexOf(text) + text.length }))} />}
    </article>
  );
}
