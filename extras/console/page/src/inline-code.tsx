/** Show a text of the gateway. The commands between backticks in it are code. */
export const InlineCode = ({ text }: { text: string }) => <>{text.split("`").map((part, index) => (index % 2 ? <code>{part}</code> : part))}</>;
