// Package recent is a map of bounded size that forgets what was not asked for
// longest.
package recent

import "container/list"

// Map is such a map. Its owner guards it.
type Map[K comparable, V any] struct {
	limit int
	order *list.List // of entry[K, V], the last used in front
	at    map[K]*list.Element
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

// New makes a map of at most limit keys.
func New[K comparable, V any](limit int) *Map[K, V] {
	return &Map[K, V]{limit: limit, order: list.New(), at: map[K]*list.Element{}}
}

// Get gives what stands at key, and counts as a use.
func (r *Map[K, V]) Get(key K) (v V, ok bool) {
	e, ok := r.at[key]
	if !ok {
		return v, false
	}
	r.order.MoveToFront(e)
	return e.Value.(*entry[K, V]).value, true
}

// Put puts v at key.
func (r *Map[K, V]) Put(key K, v V) {
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
