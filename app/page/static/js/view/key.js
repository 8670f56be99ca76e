// Asks for the API key. It is sent once, for a cookie that scripts cannot read, and kept nowhere here.
import { useSignal } from "../../vendor/signals.js";
import { html } from "../html.js";
import { login } from "../server.js";
import { text } from "../strings.js";

export function Key() {
  const problem = useSignal("");
  const submit = async (event) => {
    event.preventDefault();
    const form = event.target;
    try {
      problem.value = (await login(new FormData(form).get("key").trim())) ? "" : text.keyWrong;
    } catch (error) {
      problem.value = error.message;
    }
  };
  return html`
    <main class="gate">
      <p class="brand">${text.name}</p>
      <form onSubmit=${submit}>
        <h1>${text.keyHeading}</h1>
        <label>
          <span class="label">${text.keyLabel}</span>
          <input class="field" name="key" type="password" autocomplete="current-password" required autofocus />
        </label>
        ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
        <button class="button" type="submit">${text.keySubmit}</button>
      </form>
    </main>
  `;
}
