// The routing policy, and trying another one for a limited time.

import { postJson, Refused } from "./api.js";
import { byId, number } from "./dom.js";

let store = null;

export function preparePolicy(storeGiven, canSwitch) {
  store = storeGiven;
  byId("policy-form").hidden = !canSwitch;
  byId("policy-closed").hidden = canSwitch;
  byId("sure").addEventListener("change", () => { byId("try").disabled = !byId("sure").checked; });
  byId("policy-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("new-policy").value, Number(byId("minutes").value) * 60);
  });
  byId("end-trial").addEventListener("click", () => ask(null, undefined));
}

export function showPolicy() {
  const { policy, trial_left_s: left } = store.status;
  byId("end-trial").disabled = left === null;
  const text = left === null
    ? `The router follows the policy ${policy} of the configuration.`
    : `The router tries the policy ${policy} for another ${number(Math.ceil(left))} s, then returns to that of the configuration.`;
  if (byId("policy-now").textContent !== text) byId("policy-now").textContent = text;
}

async function ask(policy, seconds) {
  byId("policy-answer").textContent = byId("policy-error").textContent = "";
  try {
    const body = { policy, instead_of: store.known.policy };
    await postJson("v1/outrider/policy", seconds === undefined ? body : { ...body, for_s: seconds });
    byId("policy-answer").textContent = policy === null ? "The trial ends." : `The router tries ${policy} now.`;
    byId("sure").checked = false;
    byId("try").disabled = true;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    byId("policy-error").textContent = error.message;
  }
}
