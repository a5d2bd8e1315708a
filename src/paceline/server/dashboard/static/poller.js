// Asks for the overview once a second while the page is visible.

import { call } from "./api.js";

const INTERVAL = 1000;
const visible = () =>
  new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", resolve, { once: true });
  });

/** `heard(report)` after every answer, `failed(error)` when there was none. A key that may not ask is not asked with again. */
export async function poll(heard, failed) {
  let since = 0;
  for (;;) {
    await visible();
    try {
      const report = await (await call(`v1/paceline/overview?since=${since}`)).json();
      since = report.samples.at(-1)?.time ?? since;
      heard(report);
    } catch (error) {
      failed(error);
      if (error.status === 403) return;
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}
