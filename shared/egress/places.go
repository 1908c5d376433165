package egress

import "strings"

// countries are the codes that ISO 3166-1 assigns (alpha-2, 249 of them).
var countries = words(`
	AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS BT BV BW BY BZ
	CA CC CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE EG EH ER ES ET FI FJ FK FM FO FR
	GA GB GD GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM HN HR HT HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP
	KE KG KH KI KM KN KP KR KW KY KZ LA LB LC LI LK LR LS LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT
	MU MV MW MX MY MZ NA NC NE NF NG NI NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW
	SA SB SC SD SE SG SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO TR TT TV TW TZ
	UA UG UM US UY UZ VA VC VE VG VI VN VU WF WS YE YT ZA ZM ZW`)

// states are the US states, the federal district and the inhabited
// territories, without the us_ before them.
var states = words(`
	alabama alaska arizona arkansas california colorado connecticut delaware florida georgia hawaii idaho illinois
	indiana iowa kansas kentucky louisiana maine maryland massachusetts michigan minnesota mississippi missouri
	montana nebraska nevada new_hampshire new_jersey new_mexico new_york north_carolina north_dakota ohio oklahoma
	oregon pennsylvania rhode_island south_carolina south_dakota tennessee texas utah vermont virginia washington
	west_virginia wisconsin wyoming
	district_of_columbia american_samoa guam northern_mariana_islands puerto_rico virgin_islands`)

const statePrefix = "us_"

func words(list string) map[string]bool {
	all := map[string]bool{}
	for _, w := range strings.Fields(list) {
		all[w] = true
	}
	return all
}

func parseCountry(r *Rule, v string) string {
	if r.Country = strings.ToUpper(v); !countries[r.Country] {
		return "be a country's code of two letters (ISO 3166-1), such as US, GB or DE"
	}
	return ""
}

// parseState takes "us_new_york" and "New York".
func parseState(r *Rule, v string) string {
	name, ok := place(v)
	name = strings.TrimPrefix(name, statePrefix)
	if !ok || !states[name] {
		return "be us_ and the name of a US state, such as us_new_york"
	}
	r.State = statePrefix + name
	return ""
}

func parseCity(r *Rule, v string) string {
	name, ok := place(v)
	if !ok || len(name) > maxCity {
		return "be a city's name of up to 64 letters a to z, digits and underscores, such as new_york"
	}
	r.City = name
	return ""
}

// place writes a name as providers want it: lower case, words joined by
// underscores, "St. John's" without its marks ("st_johns"). No hyphen stays: in
// user names of providers it parts one option from the next, so that a city
// could order something else. ok is false for other characters, accents among them.
func place(v string) (name string, ok bool) {
	v = strings.NewReplacer(".", "", "'", "", "’", "").Replace(strings.ToLower(v))
	parts := strings.FieldsFunc(v, func(c rune) bool { return c == ' ' || c == '_' || c == '-' })
	name = strings.Join(parts, "_")
	return name, name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}
