package daemon

import (
	"os"
	"testing"
)

// Defaults follow BERTH_HOME and BERTH_LISTEN; a variable or flag of their own wins.
func TestDefaultsFollowTheHome(t *testing.T) {
	type flags struct {
		Key string `default:"${home}/dev.key" env:"BERTH_TEST_KEY"`
		URL string `default:"http://${listen}"`
	}
	args := os.Args
	defer func() { os.Args = args }()
	for _, x := range []struct {
		home, listen, key string
		args              []string
		want              flags
	}{
		{"", "", "", nil, flags{"/var/lib/berth/dev.key", "http://127.0.0.1:8080"}},
		{"/h", "127.0.0.1:9", "", nil, flags{"/h/dev.key", "http://127.0.0.1:9"}},
		{"/h", "", "/k", []string{"--url=u"}, flags{"/k", "u"}},
	} {
		t.Setenv("BERTH_HOME", x.home)
		t.Setenv("BERTH_LISTEN", x.listen)
		t.Setenv("BERTH_TEST_KEY", x.key)
		if x.key == "" {
			os.Unsetenv("BERTH_TEST_KEY") // Setenv above puts it back
		}
		os.Args = append([]string{"berth"}, x.args...)
		var got flags
		Parse(&got, "berth", "")
		if got != x.want {
			t.Errorf("home %q, listen %q, key %q: %+v, want %+v", x.home, x.listen, x.key, got, x.want)
		}
	}
}
