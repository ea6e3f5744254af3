// The feedback form of a run. A new entry is added to the list without a reload.
import { h, saveOnSubmit, sendJson, toast } from '../dom.js';

/** Returns the line of a feedback entry, like those that the server renders by `feedback.html`. */
function entryLine({ rating, text, position, user_label: user, created_at: at }) {
  const tone = rating > 0 ? 'good' : rating < 0 ? 'bad' : 'neutral';
  const sign = { good: '+', bad: '\u2212', neutral: '' }[tone];
  const hint = (content, props) => content && [' ', h('span', { class: 'hint', ...props }, content)];
  return h('li', { 'data-position': position, 'data-tone': tone },
    h('span', { class: `rating ${tone} num` }, sign + Math.abs(rating)),
    text && [' ', h('q', {}, text)],
    hint(Number.isInteger(position) && `at token ${position}`, { 'data-place': true }),
    hint(user),
    ' ', h('time', { class: 'hint', datetime: at }, 'just now'));
}

/** Returns the body of the request for the form, without empty fields. */
function bodyOf(form) {
  const fields = new FormData(form);
  const [text, position] = [fields.get('text').trim(), fields.get('position')];
  return { rating: Number(fields.get('rating')), ...(text && { text }), ...(position && { position: Number(position) }) };
}

/**
 * Sets up the feedback dialog of a run. Returns the function that opens it, with the index of the token to which the feedback
 * refers, or null. `onAdded()` is called after an entry was added to the list.
 */
export function setUpFeedbackForm(id, onAdded) {
  const dialog = document.querySelector('[data-feedback-dialog]');
  const section = document.querySelector('[data-feedback]');
  const form = dialog.querySelector('form');
  saveOnSubmit(form, async () => {
    const response = await sendJson(`/api/v1/runs/${encodeURIComponent(id)}/feedback`, bodyOf(form));
    section.querySelector('ul').append(entryLine(await response.json()));
    section.hidden = false;
    onAdded();
    form.reset();
    toast('Feedback saved');
  });

  return (token) => {
    form.querySelector('[role=alert]').textContent = '';
    form.elements.position.value = token ?? '';
    dialog.showModal();
  };
}
