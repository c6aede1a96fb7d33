/** What the key of this page may do, and how to sign in with another. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";

interface Session {
  scopes: string[];
  signIn: () => void;
  /** Models of the catalogue that the page has not read; a search finds them. */
  unread: number;
}

export const SessionContext = createContext<Session>({ scopes: [], signIn: () => undefined, unread: 0 });

export const useUnread = (): number => useContext(SessionContext).unread;

export const useScope = (scope: string): boolean => useContext(SessionContext).scopes.includes(scope);

/** That a key of this scope is needed, and the way to sign in with one; nothing where the page has it. */
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
