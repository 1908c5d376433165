package pass

import "container/list"

// recent is a map of bounded size that forgets what was not asked for longest.
// Its owner guards it.
type recent[K comparable, V any] struct {
	limit int
	order *list.List // of entry[K, V], the last used in front
	at    map[K]*list.Element
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, order: list.New(), at: map[K]*list.Element{}}
}

func (r *recent[K, V]) get(key K) (v V, ok bool) {
	e, ok := r.at[key]
	if !ok {
		return v, false
	}
	r.order.MoveToFront(e)
	return e.Value.(*entry[K, V]).value, true
}

func (r *recent[K, V]) put(key K, v V) {
	if e, ok := r.at[key]; ok {
		e.Value.(*entry[K, V]).value = v
		r.order.MoveToFront(e)
		return
	}
	r.at[key] = r.order.PushFront(&entry[K, V]{key, v})
	if r.order.Len() > r.limit {
		oldest := r.order.Back()
		r.order.Remove(oldest)
		delete(r.at, oldest.Value.(*entry[K, V]).key)
	}
}
