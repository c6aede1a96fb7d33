import { type NamedInput, useReply } from "./playground-shared";
import type { Call } from "./playground-requests";
import type { Model, Reply, Token } from "./types";

const MAX_SHOWN = 600; // characters of the part that was cut

// Parameters that change the text before the model reads it.
const SHIFTING = ["instruction", "default_instruction", "input_type", "truncate", "query_template", "doc_template"];

/** Return the prompt that a model puts before a text. Undefined if the request changes the prompt, or if the model puts
 * other text behind the input too. */
function promptOf(model: Model, params: Record<string, unknown>): string | undefined {
  if (SHIFTING.some((name) => name in params) || "default_instruction" in model.prompt_texts) return undefined;
  const template = model.prompt_texts[params["is_query"] === true ? "query" : "document"] ?? "{text}";
  const [before = "", after] = template.split("{text}");
  return after === "" && !before.includes("{instruction}") ? before : undefined;
}

/** The places at which texts were truncated. Shows nothing if the model reads more with a text than a prompt before it. */
export function TruncatedTexts({ model, call, reply, inputs }: { model: Model; call: Call; reply: Reply; inputs: NamedInput[] }) {
  const indices = reply.usage.truncated_items.filter((index) => inputs[index]?.input.text);
  const prompt = promptOf(model, call.body.params ?? {});
  const isKnown = indices.length > 0 && prompt !== undefined;
  const texts = indices.map((index) => `${prompt}${inputs[index]?.input.text ?? ""}`);
  const tokens = useReply<Token[][]>(isKnown ? `/tei/${model.id}/tokenize` : "", { inputs: texts });
  if (!tokens.value) return null;
  return (
    <>
      {indices.map((index, at) => <TruncatedText key={index} index={index} text={texts[at] ?? ""} tokens={tokens.value?.[at] ?? []} tokensRead={reply.items?.[index]?.usage?.prompt_tokens ?? 0} />)}
    </>
  );
}

/** Return true if a model did not read a token. It reads `tokensRead` tokens, the last of which is the special token at the
 * end of the text. */
export const isTruncated = (token: Token, index: number, tokensRead: number): boolean => index >= tokensRead - 1 && !token.special;

/** The end of the part that the model read, and the beginning of the part that was cut. */
function TruncatedText({ index, text, tokens, tokensRead }: { index: number; text: string; tokens: Token[]; tokensRead: number }) {
  const first = tokens.find((token, index) => isTruncated(token, index, tokensRead) && token.start !== null);
  if (!first) return null;
  const bytes = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const [head, cut] = [decoder.decode(bytes.slice(0, first.start ?? 0)), decoder.decode(bytes.slice(first.start ?? 0))];
  return (
    <>
      <h3>{`The part of text ${index + 1} that was cut: the model reads ${tokensRead} of its ${tokens.length} tokens`}</h3>
      <p class="tokens">
        {`${head.length > MAX_SHOWN / 4 ? "…" : ""}${head.slice(-MAX_SHOWN / 4)}`}
        <mark class="cut">{`${cut.slice(0, MAX_SHOWN)}${cut.length > MAX_SHOWN ? `… ${cut.length - MAX_SHOWN} more characters` : ""}`}</mark>
      </p>
    </>
  );
}
