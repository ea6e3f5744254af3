// The feedback form of a run. The list is updated without a reload of the page.
import { runPath, sendJson } from '../api.js';
import { saveOnSubmit } from '../dialogs.js';
import { toast } from '../dom.js';
import { reloadContents } from '../fragments.js';

/** Returns the body of the request for the form, without empty fields. The form counts tokens from 1, the API from 0. */
function bodyOf(form) {
  const fields = new FormData(form);
  const [text, position] = [fields.get('text').trim(), fields.get('position')];
  return { rating: Number(fields.get('rating')), ...(text && { text }), ...(position && { position: Number(position) - 1 }) };
}

/**
 * Sets up the feedback dialog of a run. Returns the function that opens it, with the index of the token to which the feedback
 * refers, or null. `onAdded()` is called after an entry was added to the list.
 */
export function setUpFeedbackForm(id, onAdded) {
  const dialog = document.querySelector('[data-feedback-dialog]');
  const form = dialog.querySelector('form');
  saveOnSubmit(form, async () => {
    await sendJson(`${runPath(id)}/feedback`, bodyOf(form));
    toast('Feedback saved');
    await reloadContents(['[data-feedback]'], 'Saved', onAdded);
    form.reset();
  });

  return (token) => {
    form.querySelector('[role=alert]').textContent = '';
    form.elements.position.value = token === null ? '' : token + 1;
    dialog.showModal();
  };
}
