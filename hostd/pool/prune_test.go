package pool

import (
	"slices"
	"testing"

	"github.com/berth-dev/berth/shared/session"
)

func TestTemplatesOfUseStay(t *testing.T) {
	k := newKeeper()
	k.made = map[string]string{string(session.Shell): "a", string(session.Both): "b", "an earlier recipe": "d"}
	removed, err := Bootstrap{Driver: k}.PruneTemplates(t.Context(), []string{"c", "elsewhere"}, 0)
	if err != nil || !slices.Equal(removed, []string{"d"}) {
		t.Errorf("removed %q, %v", removed, err)
	}
	if removed, err := (Bootstrap{Driver: k.yardDriver}).PruneTemplates(t.Context(), nil, 0); err != nil || len(removed) > 0 {
		t.Errorf("a driver without templates: removed %q, %v", removed, err)
	}
}
