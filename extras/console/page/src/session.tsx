/** The scopes of the API key of this page, and the way to sign in with another key. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";

interface Session {
  scopes: string[];
  signIn: () => void;
  /** The number of models of the catalogue that are not on the page; a search finds them. */
  unlisted: number;
}

export const SessionContext = createContext<Session>({ scopes: [], signIn: () => undefined, unlisted: 0 });

export const useUnlisted = (): number => useContext(SessionContext).unlisted;

/** Return true if the key has a scope. */
export const useScope = (scope: string): boolean => useContext(SessionContext).scopes.includes(scope);

/** Say that an action needs a scope, with a button that signs in. Shows nothing if the key has the scope. */
export function MissingScope({ scope, subject }: { scope: string; subject: string }) {
  const { scopes, signIn } = useContext(SessionContext);
  if (scopes.includes(scope)) return null;
  return (
    <p class="lacking">
      {`${subject} a key with the scope ${scope}. `}
      <button type="button" class="link" onClick={signIn}>Sign in</button>
    </p>
  );
}
