// Keeps the end in view while text arrives, but only for a reader who is at the end.
import { useLayoutEffect } from "../../vendor/preact-hooks.js";
import { useSignal, useSignalEffect } from "../../vendor/signals.js";
import { sent } from "../state.js";

const near = 48; // pixels from the end that still count as being there

/**
 * @param {{current: HTMLElement}} scroller the element that scrolls; its first child grows
 * @returns {{away: Signal<boolean>, jump: () => void}} whether the reader left the end, and the way back
 */
export function useStickToBottom(scroller) {
  const away = useSignal(false);
  const jump = () => {
    away.value = false;
    scroller.current.scrollTop = scroller.current.scrollHeight;
  };
  useLayoutEffect(() => {
    const element = scroller.current;
    const distance = () => element.scrollHeight - element.scrollTop - element.clientHeight;
    // Growth alone fires no scroll event, so these come from the reader or from our own step to the end.
    const onScroll = () => (away.value = distance() > near);
    const onGrowth = new ResizeObserver(() => {
      if (!away.peek()) element.scrollTop = element.scrollHeight;
    });
    element.addEventListener("scroll", onScroll, { passive: true });
    onGrowth.observe(element.firstElementChild);
    onGrowth.observe(element);
    return () => {
      element.removeEventListener("scroll", onScroll);
      onGrowth.disconnect();
    };
  }, []);
  // A question just sent is where its reader wants to be; and so is the end of what was just opened.
  useSignalEffect(() => {
    if (sent.value >= 0) jump();
  });
  return { away, jump };
}
