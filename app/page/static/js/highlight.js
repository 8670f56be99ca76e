// Colours for code in the languages that are vendored; any other code stays plain.
import hljs from "../vendor/highlight/core.js";
import bash from "../vendor/highlight/bash.js";
import c from "../vendor/highlight/c.js";
import cpp from "../vendor/highlight/cpp.js";
import css from "../vendor/highlight/css.js";
import diff from "../vendor/highlight/diff.js";
import go from "../vendor/highlight/go.js";
import java from "../vendor/highlight/java.js";
import javascript from "../vendor/highlight/javascript.js";
import json from "../vendor/highlight/json.js";
import markdown from "../vendor/highlight/markdown.js";
import python from "../vendor/highlight/python.js";
import rust from "../vendor/highlight/rust.js";
import shell from "../vendor/highlight/shell.js";
import sql from "../vendor/highlight/sql.js";
import typescript from "../vendor/highlight/typescript.js";
import xml from "../vendor/highlight/xml.js";
import yaml from "../vendor/highlight/yaml.js";

const languages = {
  bash, c, cpp, css, diff, go, java, javascript, json, markdown, python, rust, shell, sql, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(languages)) hljs.registerLanguage(name, grammar);

const longest = 50_000;

/** Code as markup with its parts marked, or null when the language is not known or the code is very long. */
export function highlight(code, language) {
  const name = (language ?? "").trim().split(/\s/, 1)[0].toLowerCase();
  if (!hljs.getLanguage(name) || code.length > longest) return null;
  return hljs.highlight(code, { language: name, ignoreIllegals: true }).value;
}
