/** A text of the gateway with its commands, which stand between backticks, as code. */
export const InlineCode = ({ text }: { text: string }) => <>{text.split("`").map((part, place) => (place % 2 ? <code>{part}</code> : part))}</>;
