package gossip

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"
)

func TestMetaRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := Meta{
			Role:     rapid.SampledFrom([]Role{Gateway, Hostd, Proxyd}).Draw(rt, "role"),
			Region:   rapid.StringN(-1, 30, 80).Draw(rt, "region"),
			Addr:     rapid.SampledFrom([]string{"127.0.0.1:7103", "[::1]:1", "host.example:65535"}).Draw(rt, "addr"),
			Driver:   rapid.SampledFrom([]string{"", "oci", "microvm"}).Draw(rt, "driver"),
			Free:     rapid.IntRange(0, 1<<40).Draw(rt, "free"),
			Warm:     rapid.MapOfN(rapid.StringN(1, 5, 20), rapid.IntRange(1, 999), 1, 4).Draw(rt, "warm"),
			CPUClass: rapid.StringN(-1, 200, 600).Draw(rt, "class"),
		}
		wire, err := m.encode()
		if err != nil {
			if len(wire) <= MetaLimit {
				rt.Fatalf("%d bytes refused: %v", len(wire), err)
			}
			return
		}
		got, err := decodeMeta(wire)
		if err != nil || !reflect.DeepEqual(got, m) || len(wire) > MetaLimit {
			rt.Fatalf("%+v came back as %+v: %v", m, got, err)
		}
	})
}

func TestForeignMetasAreRefused(t *testing.T) {
	for _, bad := range []string{"", "null", "{}", "\x00\x01", `{"v":2,"r":"hostd","a":"h:1"}`, `{"v":1,"r":"king","a":"h:1"}`,
		`{"v":1,"r":"hostd","a":"h"}`, `{"v":1,"r":"hostd","a":"h:1","f":-1}`, `{"v":1,"r":"hostd","a":"h:1","w":{"both":-1}}`} {
		if m, err := decodeMeta([]byte(bad)); err == nil {
			t.Errorf("%s became %+v", bad, m)
		}
	}
	if _, err := decodeMeta([]byte(`{"v":1,"r":"hostd","a":"h:1","later":true}`)); err != nil {
		t.Errorf("a field of a newer peer: %v", err)
	}
}

func FuzzDecodeMeta(f *testing.F) {
	f.Add([]byte(`{"v":1,"r":"hostd","a":"h:1","f":3,"w":{"both":1}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err == nil && m.check() != nil {
			t.Errorf("%q became %+v", b, m)
		}
	})
}
