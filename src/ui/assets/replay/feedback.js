// Feedback on a run: the form, and the new entry without a reload. The server's `FeedbackView` has the same format.
import { fetchApi, h, toast } from '../dom.js';

/** Returns the line of one feedback entry, as rendered by the server. */
function line({ rating, text, position, user_label: user, created_at: at }) {
  const tone = rating > 0 ? 'good' : rating < 0 ? 'bad' : 'neutral';
  const sign = { good: '+', bad: '\u2212', neutral: '' }[tone];
  const hint = (words, props) => words && [' ', h('span', { class: 'hint', ...props }, words)];
  return h('li', { 'data-position': position, 'data-tone': tone },
    h('span', { class: `rating ${tone} num` }, sign + Math.abs(rating)),
    text && [' ', h('q', {}, text)],
    hint(Number.isInteger(position) && `at token ${position}`, { 'data-place': true }),
    hint(user),
    ' ', h('time', { class: 'hint', datetime: at }, 'just now'));
}

/** Returns the form's fields without empty ones. */
function filledFields(form) {
  const fields = new FormData(form);
  const [text, position] = [fields.get('text').trim(), fields.get('position')];
  return { rating: Number(fields.get('rating')), ...(text && { text }), ...(position && { position: Number(position) }) };
}

/**
 * Sets up the run's dialog and returns the function that opens it, for a token if one is given. `added()` is called after
 * an entry was added to the list.
 */
export function feedback(id, added) {
  const dialog = document.querySelector('[data-feedback-dialog]');
  const given = document.querySelector('[data-feedback]');
  const form = dialog.querySelector('form');
  const problem = dialog.querySelector('[role=alert]');
  const send = form.querySelector('[value=send]');

  form.addEventListener('submit', async (event) => {
    if (event.submitter?.value === 'cancel') return;
    event.preventDefault();
    send.disabled = true;
    problem.textContent = '';
    try {
      const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/feedback`, {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(filledFields(form)),
      });
      given.querySelector('ul').append(line(await response.json()));
      given.hidden = false;
      added();
      form.reset();
      dialog.close();
      toast('Feedback saved');
    } catch (error) {
      problem.textContent = `Not saved: ${error.message}`;
    } finally {
      send.disabled = false;
    }
  });

  return (token) => {
    problem.textContent = '';
    if (token !== null) form.elements.position.value = token;
    dialog.showModal();
  };
}
